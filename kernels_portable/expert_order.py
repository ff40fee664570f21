"""Order of (token, expert) pairs by expert, and the blocks of rows that grouped products make of it. One launch.

P pairs, E experts, S block sizes, B blocks. One program serves one expert: it counts all pairs, so it knows where its
own begin, and then places its own in order. The order is stable, and the result depends on nothing but the ids. A pair
whose expert is not here (another rank's, id -1) has no place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.expert_alignment import count_pairs, histogram_bins, pairs_of_a_step

__all__ = ["BLOCK_SIZES", "PairOrder", "order_pairs"]

BLOCK_SIZES = (16, 32, 64, 128)  # rows of a block, ascending powers of two
_FEW_PAIRS = 64  # for which a step is smaller still
_MOST_OF_A_WARP = 256  # pairs that one warp orders: none of its many sums waits for other warps


class PairOrder(NamedTuple):
    """Pairs sorted by expert, and blocks of their rows for each of `BLOCK_SIZES`.

    Attributes:
        order_P: int32 pair at each place; -1 behind the last place that is taken.
        places_P: int32 place of each pair; -1 for a pair that has none.
        weights_P: float32 weight of the pair at each place; 0 behind the last one.
        counts_E: int32 pairs of each expert.
        starts_SE: int32 (1 + sizes, experts + 1): first place of each expert and the end, then its first block and
            the end for each size.
        blocks_SB: int32 (sizes, blocks): number of a block within its expert times 65,536, plus the expert; -1 behind
            the last block. There are as many as the worst case needs. Rows of both tables begin at multiples of 16
            bytes, so that a kernel that reads one is the same for every number of pairs and experts.
    """

    order_P: Tensor
    places_P: Tensor
    weights_P: Tensor
    counts_E: Tensor
    starts_SE: Tensor
    blocks_SB: Tensor


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])  # one kernel for all numbers of tokens
def _order_pairs_kernel(
    ids_ptr, weights_ptr, order_ptr, places_ptr, sorted_ptr, counts_ptr, starts_ptr, blocks_ptr, num_pairs, num_blocks,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, STARTS: tl.constexpr, SMALLEST: tl.constexpr, SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    counts = count_pairs(ids_ptr, num_pairs, EXPERTS, BINS, BLOCK)
    bins = tl.arange(0, BINS)
    mine = bins == expert
    count = tl.sum(tl.where(mine, counts, 0), axis=0)
    total = tl.sum(counts, axis=0)
    placed = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    tl.store(counts_ptr + expert, count)
    tl.store(starts_ptr + expert, placed)
    tl.store(starts_ptr + EXPERTS, total, mask=expert == 0)
    for size in tl.static_range(SIZES):
        rows = SMALLEST << size  # known to the compiler, as `size` is
        blocks = (counts + (rows - 1)) // rows
        first = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
        end = tl.sum(blocks, axis=0)
        num_mine = (count + (rows - 1)) // rows
        starts = starts_ptr + (size + 1) * STARTS
        tl.store(starts + expert, first)
        tl.store(starts + EXPERTS, end, mask=expert == 0)
        out = blocks_ptr + size * num_blocks
        for start in range(0, num_mine, BLOCK):
            block = start + tl.arange(0, BLOCK)
            tl.store(out + first + block, block * 65536 + expert, mask=block < num_mine)
        if expert == 0:
            for start in range(end, num_blocks, BLOCK):
                block = start + tl.arange(0, BLOCK)
                tl.store(out + block, tl.full((BLOCK,), -1, tl.int32), mask=block < num_blocks)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        ids = tl.load(ids_ptr + pairs, mask=inside, other=-1)
        is_mine = ids == expert
        found = is_mine.to(tl.int32)
        place = placed + tl.cumsum(found, axis=0) - found
        weights = tl.load(weights_ptr + pairs, mask=is_mine, other=0.0)
        tl.store(order_ptr + place, pairs, mask=is_mine)
        tl.store(places_ptr + pairs, place, mask=is_mine)
        tl.store(sorted_ptr + place, weights, mask=is_mine)
        placed += tl.sum(found, axis=0)
        if expert == 0:
            foreign = inside & ((ids < 0) | (ids >= EXPERTS))
            tl.store(places_ptr + pairs, tl.full((BLOCK,), -1, tl.int32), mask=foreign)
            tl.store(order_ptr + pairs, tl.full((BLOCK,), -1, tl.int32), mask=inside & (pairs >= total))
            tl.store(sorted_ptr + pairs, tl.zeros((BLOCK,), tl.float32), mask=inside & (pairs >= total))


def _whole(size: int) -> int:
    return -(-size // 4) * 4


def order_pairs(ids_TK: Tensor, weights_TK: Tensor, *, num_experts: int) -> PairOrder:
    """Orders pairs by expert.

    Args:
        ids_TK: Contiguous int32 expert of each pair; a pair of another rank's expert (id -1) is left out.
        weights_TK: Contiguous float32 weight of each pair.
        num_experts: Experts, below 65,536.
    """
    num_pairs, device, smallest = ids_TK.numel(), ids_TK.device, BLOCK_SIZES[0]
    num_blocks = _whole((num_pairs + min(num_experts, num_pairs) * (smallest - 1)) // smallest)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    found = PairOrder(
        order_P=integers(num_pairs),
        places_P=integers(num_pairs),
        weights_P=torch.empty((num_pairs,), dtype=torch.float32, device=device),
        counts_E=integers(num_experts),
        starts_SE=integers(1 + len(BLOCK_SIZES), _whole(num_experts + 1))[:, : num_experts + 1],
        blocks_SB=integers(len(BLOCK_SIZES), num_blocks),
    )
    block = _FEW_PAIRS if num_pairs <= _FEW_PAIRS else pairs_of_a_step(num_pairs)
    _order_pairs_kernel[(num_experts,)](
        ids_TK, weights_TK, *found, num_pairs, num_blocks, EXPERTS=num_experts, BINS=histogram_bins(num_experts),
        STARTS=_whole(num_experts + 1), SMALLEST=smallest, SIZES=len(BLOCK_SIZES), BLOCK=block,
        num_warps=1 if block <= _MOST_OF_A_WARP else 4,
    )  # fmt: skip
    return found
