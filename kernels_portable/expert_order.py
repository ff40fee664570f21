"""Order of (token, expert) pairs by expert, without padding. P pairs, E experts.

Torch's own sort and count: a kernel of ours that did it in one launch was right in the interpreter and wrong on an H200
(Triton 3.6.0, few experts), so that it is left to a library until it can be tried there again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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


def order_pairs(ids_TK: Tensor, weights_TK: Tensor, *, num_experts: int) -> PairOrder:
    """Orders pairs by expert, stably; the result depends on nothing but the ids.

    Args:
        ids_TK: int32 expert of each pair. A pair of another rank's expert (id -1) counts as one of the first
            expert, with weight 0.
        weights_TK: float32 weight of each pair.
        num_experts: Experts.
    """
    ids_P = ids_TK.flatten().clamp(0, num_experts - 1).long()
    served_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    weights_P = torch.where(served_TK, weights_TK, 0.0).flatten()
    order_P = torch.argsort(ids_P, stable=True)
    places_P = torch.empty_like(order_P)
    places_P[order_P] = torch.arange(len(order_P), device=ids_TK.device)
    counts_E = torch.zeros((num_experts,), dtype=torch.int32, device=ids_TK.device)
    counts_E.scatter_add_(0, ids_P, torch.ones_like(ids_P, dtype=torch.int32))
    return PairOrder(order_P.int(), places_P.int(), weights_P[order_P].contiguous(), counts_E)
