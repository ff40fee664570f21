"""Order of (token, expert) pairs by expert, without padding. P pairs, E experts.

One program serves one expert: it counts all pairs, so it knows where its own begin, and then places its own in order.
The order is stable and the result depends on nothing but the ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PairOrder", "order_pairs"]


class PairOrder(NamedTuple):
    """Pairs sorted by expert.

    Attributes:
        order_P: int32 pair at each place.
        places_P: int32 place of each pair.
        weights_P: float32 weight of the pair at each place; 0 for pairs that no expert serves.
        counts_E: int32 pairs of each expert.
    """

    order_P: Tensor
    places_P: Tensor
    weights_P: Tensor
    counts_E: Tensor


@triton.jit
def _order_pairs_kernel(
    ids_ptr, weights_ptr, order_ptr, places_ptr, sorted_ptr, counts_ptr, num_pairs, EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    counts = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        ids = tl.load(ids_ptr + pairs, mask=inside, other=0)
        counts += tl.histogram(tl.minimum(tl.maximum(ids, 0), EXPERTS - 1), EXPERT_BLOCK, mask=inside)
    mine = tl.arange(0, EXPERT_BLOCK) == expert
    placed = tl.sum(tl.where(mine, tl.cumsum(counts, axis=0) - counts, 0), axis=0)
    tl.store(counts_ptr + expert, tl.sum(tl.where(mine, counts, 0), axis=0))
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        ids = tl.load(ids_ptr + pairs, mask=inside, other=0)
        found = inside & (tl.minimum(tl.maximum(ids, 0), EXPERTS - 1) == expert)
        count = found.to(tl.int32)
        place = placed + tl.cumsum(count, axis=0) - count
        served = found & (ids >= 0) & (ids < EXPERTS)
        weights = tl.load(weights_ptr + pairs, mask=served, other=0.0)
        tl.store(order_ptr + place, pairs, mask=found)
        tl.store(places_ptr + pairs, place, mask=found)
        tl.store(sorted_ptr + place, weights, mask=found)
        placed += tl.sum(count, axis=0)


def order_pairs(ids_TK: Tensor, weights_TK: Tensor, *, num_experts: int) -> PairOrder:
    """Orders pairs by expert.

    Args:
        ids_TK: Contiguous int32 expert of each pair. A pair of another rank's expert (id -1) counts as one of the first
            expert, with weight 0.
        weights_TK: Contiguous float32 weight of each pair.
        num_experts: Experts.
    """
    num_pairs, device = ids_TK.numel(), ids_TK.device
    order, places = torch.empty((2, num_pairs), dtype=torch.int32, device=device)
    weights = torch.empty((num_pairs,), dtype=torch.float32, device=device)
    counts = torch.empty((num_experts,), dtype=torch.int32, device=device)
    _order_pairs_kernel[(num_experts,)](
        ids_TK, weights_TK, order, places, weights, counts, num_pairs, EXPERTS=num_experts,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        BLOCK=min(1024, max(128, triton.next_power_of_2(num_pairs))), num_warps=4,
    )  # fmt: skip
    return PairOrder(order, places, weights, counts)
