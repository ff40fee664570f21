"""One token for each row out of the parts of a draw. R rows, V ids, C parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.sampling_draw import DrawParts, draw_parts
from halocline.kernels_portable.sampling_threshold import sampling_thresholds

__all__ = ["pick_tokens", "sample_tokens"]


@triton.jit
def _pick_tokens_kernel(values_ptr, ids_ptr, largest_ptr, out_ptr, PARTS: tl.constexpr, PART_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PART_BLOCK)
    inside = parts < PARTS
    values = tl.load(values_ptr + row * PARTS + parts, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * PARTS + parts, mask=inside, other=2147483647)
    largest = tl.load(largest_ptr + row * PARTS + parts, mask=inside, other=float("-inf"))
    # A row is usable if no logit is NaN or +inf and at least one is finite.
    spoilt = tl.sum(((largest != largest) | (largest == float("inf"))).to(tl.int32), axis=0)  # noqa: PLR0124
    usable = tl.sum((largest > float("-inf")).to(tl.int32), axis=0)
    token = tl.min(tl.where(values == tl.max(values, axis=0), ids, 2147483647), axis=0)
    tl.store(out_ptr + row, tl.where((spoilt > 0) | (usable == 0), -1, token))


def pick_tokens(parts: DrawParts) -> Tensor:
    """int32 (rows,) ids: the lowest of the best ones; -1 for a row that holds NaN or infinity, or nothing finite."""
    rows, num_parts = parts.values_RC.shape
    out = torch.empty((rows,), dtype=torch.int32, device=parts.values_RC.device)
    if rows:
        _pick_tokens_kernel[(rows,)](
            parts.values_RC, parts.ids_RC, parts.largest_RC, out, PARTS=num_parts,
            PART_BLOCK=triton.next_power_of_2(num_parts), num_warps=1,
        )  # fmt: skip
    return out


def sample_tokens(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    counters_R: Tensor,
) -> Tensor:
    """Draws one token for each row.

    Args:
        logits_RV: float32 (rows, vocabulary), ids contiguous.
        temperature_R: float32; 0 means the largest logit, lowest id on a tie.
        top_k_R: int32; 0 means all.
        top_p_R: float32 in (0, 1].
        min_p_R: float32 in [0, 1).
        seeds_R: int64 seeds.
        counters_R: int64 tokens generated before.

    Returns:
        int32 (rows,) ids; -1 for a row that holds NaN or infinity, or nothing finite.
    """
    thresholds = sampling_thresholds(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return pick_tokens(draw_parts(logits_RV, temperature_R, thresholds, seeds_R, counters_R))
