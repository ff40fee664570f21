"""Joins the parts of a divided softmax and adds the sink. T tokens, S splits, H heads, D lanes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combine_splits"]

_HEADS = 2  # heads of one program


@triton.jit
def _combine_splits_kernel(
    part_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, num_heads, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)[None, :]
    present = heads < num_heads
    inside = present[:, None] & (lanes < WIDTH)
    splits = tl.arange(0, SPLITS)[:, None]
    lse = tl.load(
        part_lse_ptr + (token * SPLITS + splits) * num_heads + heads[None, :],
        mask=present[None, :],
        other=float("-inf"),
    )
    largest = tl.max(lse, axis=0)
    seen = largest > float("-inf")
    base = tl.where(seen, largest, 0.0)
    total = tl.sum(tl.exp2(lse - base[None, :]), axis=0)
    sink = tl.load(sink_ptr + heads, mask=present, other=0.0).to(tl.float32) * 1.4426950408889634
    whole = total + tl.exp2(sink - base)
    joined = tl.zeros((HEADS, LANES), tl.float32)
    for split in range(SPLITS):
        place = (token * SPLITS + split) * num_heads + heads
        share = tl.exp2(tl.load(part_lse_ptr + place, mask=present, other=float("-inf")) - base)
        part = tl.load(part_ptr + place[:, None] * WIDTH + lanes, mask=inside & (share > 0)[:, None], other=0.0)
        joined += share[:, None] * part
    joined = joined * tl.where(seen, 1.0 / tl.where(seen, whole, 1.0), 0.0)[:, None]
    place = token * num_heads + heads
    tl.store(out_ptr + place[:, None] * WIDTH + lanes, joined.to(out_ptr.dtype.element_ty), mask=inside)
    natural = (base + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453
    tl.store(lse_ptr + place, tl.where(seen, natural, float("inf")), mask=present)


def combine_splits(part_TSHD: Tensor, part_lse_TSH: Tensor, sink_H: Tensor, out_THD: Tensor, lse_TH: Tensor) -> None:
    """Writes the joined output and log-sum-exp.

    Args:
        part_TSHD: float32 normalised outputs of the parts; a power of two of them.
        part_lse_TSH: float32 log-sum-exp of the parts in powers of two; -inf for a part without rows.
        sink_H: (heads,) float32 logits in natural units.
        out_THD: Written: output.
        lse_TH: Written: float32 natural log-sum-exp without the sink; +inf for a token that sees no row.
    """
    num_tokens, num_splits, num_heads, width = part_TSHD.shape
    _combine_splits_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        part_TSHD, part_lse_TSH, sink_H, out_THD, lse_TH, num_heads, SPLITS=num_splits, WIDTH=width, HEADS=_HEADS,
        LANES=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
