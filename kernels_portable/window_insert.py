"""Norm, rotation, rounding and store of window latents. T tokens, D lanes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.page_rows import PageLayout, row_constants, store_rows
from halocline.kernels_portable.rotary import pair_turns, turn_pairs

__all__ = ["insert_window"]


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _insert_window_kernel(
    kv_ptr, weight_ptr, positions_ptr, slots_ptr, table_ptr, pages_ptr, kv_stride, eps, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    slot = tl.load(slots_ptr + row)
    stored = slot >= 0
    lanes = tl.arange(0, LANES)[None, :]
    inside = stored[:, None] & (lanes < WIDTH)
    position = tl.maximum(tl.load(positions_ptr + row), 0)
    cos, sin = pair_turns(position, table_ptr, WIDTH - ROPE, ROPE, LANES)
    kv = tl.load(kv_ptr + row[:, None] * kv_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight_ptr + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
    kv = kv * tl.rsqrt(tl.sum(kv * kv, axis=1) / WIDTH + eps)[:, None] * gain
    kv = turn_pairs(kv, cos, sin, False, 1, LANES)
    kv = kv.to(kv_ptr.dtype.element_ty).to(tl.float32)
    store_rows(pages_ptr, slot, stored, kv, WIDTH, ROPE, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, 1, LANES)


def insert_window(
    kv_TD: Tensor,
    norm_weight_D: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_PR: Tensor,
    pages: Tensor,
    layout: PageLayout,
    *,
    eps: float,
) -> None:
    """Norms, rotates, rounds and stores the latent of each token.

    Args:
        kv_TD: (tokens, width) bfloat16 or float32, lanes contiguous.
        norm_weight_D: (width,) gain.
        positions_T: int32 positions.
        slots_T: int64 slots; -1 stores nothing.
        cos_sin_PR: (positions, rotary lanes) float32 table.
        pages: uint8 pages, written in place.
        layout: Of the pages.
        eps: Added to the mean square.
    """
    if kv_TD.shape[0]:
        kv_TD = kv_TD if kv_TD.stride(1) == 1 else kv_TD.contiguous()
        _insert_window_kernel[(kv_TD.shape[0],)](
            kv_TD, norm_weight_D, positions_T, slots_T, cos_sin_PR, pages, kv_TD.stride(0), eps,
            WIDTH=layout.width, ROPE=layout.rope_width, LANES=triton.next_power_of_2(layout.width),
            **row_constants(layout), num_warps=4,
        )  # fmt: skip
