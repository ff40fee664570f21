"""Device functions of the routers: sqrt(softplus(x)) without overflow or loss, and normalised weights."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["normalised_weights", "router_score"]


@triton.jit
def router_score(logits):
    """sqrt(log(1 + exp(x))) of float32 logits, with full relative accuracy down to where exp underflows."""
    small = tl.exp(-tl.abs(logits))
    one_more = 1.0 + small
    # log(1 + z) loses z's last bits; dividing by what the sum really added restores them (Goldberg 1991, theorem 4).
    logarithm = tl.where(
        one_more == 1.0, small, tl.log(one_more) * (small / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    )
    return tl.sqrt(tl.maximum(logits, 0.0) + logarithm)


@triton.jit
def normalised_weights(scores, factor):
    """Scores (rows, chosen) over their row sums, floored at 1e-20, times a factor."""
    return scores / tl.maximum(tl.sum(scores, axis=1), 1e-20)[:, None] * factor
