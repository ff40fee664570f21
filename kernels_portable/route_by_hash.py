"""Router of hash-routed layers: a table names the experts of a token id. T tokens, E experts, V ids, K chosen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.router_score import normalised_weights, router_score

__all__ = ["route_by_hash"]

_TOKENS = 16  # tokens of a program


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["token_ids_ptr"])
def _route_by_hash_kernel(
    logits_ptr, token_ids_ptr, table_ptr, ids_ptr, weights_ptr, num_tokens, logits_stride, factor, CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    place = tl.arange(0, CHOSEN_BLOCK)[None, :]
    inside = present[:, None] & (place < CHOSEN)
    # Padding rows of a step may hold any id: they are routed as id 0, which the table has.
    token_ids = tl.maximum(tl.load(token_ids_ptr + tokens, mask=present, other=0).to(tl.int64), 0)
    experts = tl.load(table_ptr + token_ids[:, None] * CHOSEN + place, mask=inside, other=0)
    logits = tl.load(logits_ptr + tokens[:, None] * logits_stride + experts, mask=inside, other=0.0).to(tl.float32)
    scores = tl.where(inside, router_score(logits), 0.0)
    out = tokens[:, None] * CHOSEN + place
    tl.store(ids_ptr + out, experts.to(tl.int32), mask=inside)
    tl.store(weights_ptr + out, normalised_weights(scores, factor), mask=inside)


def route_by_hash(logits_TE: Tensor, token_ids_T: Tensor, table_VK: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Chooses the experts that a table names for each token id.

    Args:
        logits_TE: (tokens, experts) float32, experts contiguous; they weigh and never select.
        token_ids_T: int32 or int64 ids below the table's length; negative ones (padding) count as 0.
        table_VK: Contiguous int32 or int64 (ids, chosen).
        scale: Multiplies the normalised weights.

    Returns:
        int32 ids in the table's order and float32 weights, (tokens, chosen).
    """
    num_tokens, num_chosen = logits_TE.shape[0], table_VK.shape[1]
    ids = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=logits_TE.device)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits_TE.device)
    if num_tokens:
        _route_by_hash_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
            logits_TE, token_ids_T, table_VK, ids, weights, num_tokens, logits_TE.stride(0), scale, CHOSEN=num_chosen,
            TOKENS=_TOKENS, CHOSEN_BLOCK=triton.next_power_of_2(num_chosen), num_warps=4,
        )  # fmt: skip
    return ids, weights
