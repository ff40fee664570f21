"""Router of score-routed layers: top-k of sqrt(softplus(logits)) + bias. T tokens, E experts, K chosen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.router_score import normalised_weights, router_score

__all__ = ["route_by_score"]

_TOKENS = 1  # tokens of a program


@triton.jit(do_not_specialize=["num_tokens"])
def _route_by_score_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens, logits_stride, factor, EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr, TOKENS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERT_BLOCK)[None, :]
    present = (tokens < num_tokens)[:, None]
    inside = present & (experts < EXPERTS)
    logits = tl.load(logits_ptr + tokens[:, None] * logits_stride + experts, mask=inside, other=0.0).to(tl.float32)
    scores = router_score(logits)
    bias = tl.load(bias_ptr + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)
    biased = tl.where(experts < EXPERTS, scores + bias, float("-inf"))
    place = tl.arange(0, CHOSEN_BLOCK)[None, :]
    ids = tl.zeros((TOKENS, CHOSEN_BLOCK), tl.int32)
    chosen = tl.zeros((TOKENS, CHOSEN_BLOCK), tl.float32)
    for k in tl.static_range(CHOSEN):
        best = tl.argmax(biased, axis=1)[:, None]
        ids = tl.where(place == k, best, ids)
        chosen = tl.where(place == k, tl.sum(tl.where(experts == best, scores, 0.0), axis=1)[:, None], chosen)
        biased = tl.where(experts == best, float("-inf"), biased)
    out = tokens[:, None] * CHOSEN + place
    stored = present & (place < CHOSEN)
    tl.store(ids_ptr + out, ids, mask=stored)
    tl.store(weights_ptr + out, normalised_weights(chosen, factor), mask=stored)


def route_by_score(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> tuple[Tensor, Tensor]:
    """Chooses the experts with the highest biased score; the bias selects and never weighs.

    Args:
        logits_TE: (tokens, experts) float32, experts contiguous.
        bias_E: (experts,) float32.
        num_chosen: Experts for each token.
        scale: Multiplies the normalised weights.

    Returns:
        int32 ids, best first, and float32 weights, (tokens, num_chosen).
    """
    num_tokens, num_experts = logits_TE.shape
    ids = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=logits_TE.device)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits_TE.device)
    if num_tokens:
        _route_by_score_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
            logits_TE, bias_E, ids, weights, num_tokens, logits_TE.stride(0), scale, EXPERTS=num_experts,
            CHOSEN=num_chosen, TOKENS=_TOKENS, EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            CHOSEN_BLOCK=triton.next_power_of_2(num_chosen), num_warps=1,
        )  # fmt: skip
    return ids, weights
