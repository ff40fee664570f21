"""Order of (token, expert) pairs by expert, each expert padded to whole blocks of rows. P pairs, E experts, B blocks.

One program serves one expert: it counts all pairs, so it knows where its own begin, and then places its own in order.
The order is stable and the result depends on nothing but the ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["ExpertBlocks", "align_experts", "count_pairs", "histogram_bins", "pairs_of_a_step"]


class ExpertBlocks(NamedTuple):
    """Blocks of rows for grouped products.

    Attributes:
        pairs_N: int32 (blocks * rows,): pair of each row; -1 on rows that pad.
        experts_B: int32 expert of each block; -1 on blocks that are not used.
        rows: Rows of a block.
    """

    pairs_N: Tensor
    experts_B: Tensor
    rows: int


def histogram_bins(num_experts: int) -> int:
    """Bins of the count of pairs: a power of two, at least one for each lane of a wave."""
    return max(64, int(triton.next_power_of_2(num_experts)))


def pairs_of_a_step(num_pairs: int) -> int:
    """Pairs that a program looks at in a step: at least one for each of its threads."""
    return 256 if num_pairs <= 256 else 1024


@triton.jit
def count_pairs(ids_ptr, num_pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """int32 (BINS,) pairs of each expert; ids that are no expert's are not counted."""
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        valid = (ids >= 0) & (ids < EXPERTS)
        counts += tl.histogram(tl.where(valid, ids, 0), BINS, mask=valid)
    return counts


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])  # one kernel for all numbers of tokens
def _align_experts_kernel(
    ids_ptr, pairs_ptr, experts_ptr, num_pairs, num_blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    counts = count_pairs(ids_ptr, num_pairs, EXPERTS, BINS, BLOCK)
    blocks = (counts + (ROWS - 1)) // ROWS
    bins = tl.arange(0, BINS)
    first = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    num_mine = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    for start in range(0, num_mine, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(experts_ptr + first + block, tl.zeros((BLOCK,), tl.int32) + expert, mask=block < num_mine)
    if expert == 0:
        for start in range(tl.sum(blocks, axis=0), num_blocks, BLOCK):
            block = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + block, tl.full((BLOCK,), -1, tl.int32), mask=block < num_blocks)
    placed = first * ROWS
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        found = (tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
        place = placed + tl.cumsum(found, axis=0) - found
        tl.store(pairs_ptr + place, pairs, mask=found > 0)
        placed += tl.sum(found, axis=0)
    padding = placed + tl.arange(0, ROWS)
    tl.store(pairs_ptr + padding, tl.full((ROWS,), -1, tl.int32), mask=padding < (first + num_mine) * ROWS)


def align_experts(ids_TK: Tensor, *, num_experts: int, rows: int) -> ExpertBlocks:
    """Orders pairs by expert.

    Args:
        ids_TK: Contiguous int32 expert of each pair; negative ones (experts of another rank) are left out.
        num_experts: Experts.
        rows: Rows of a block, a power of two.

    Returns:
        Blocks; their number is the worst case for this many pairs, so that it is known on the host.
    """
    num_pairs = ids_TK.numel()
    num_blocks = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
    pairs = torch.empty((num_blocks * rows,), dtype=torch.int32, device=ids_TK.device)
    experts = torch.empty((num_blocks,), dtype=torch.int32, device=ids_TK.device)
    if num_pairs:
        _align_experts_kernel[(num_experts,)](
            ids_TK, pairs, experts, num_pairs, num_blocks, EXPERTS=num_experts, BINS=histogram_bins(num_experts),
            ROWS=rows, BLOCK=pairs_of_a_step(num_pairs), num_warps=4,
        )  # fmt: skip
    return ExpertBlocks(pairs, experts, rows)
