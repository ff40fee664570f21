"""Rounding and store of finished rows, in every row format. N rows, D lanes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.page_rows import PageLayout, row_constants, store_rows

__all__ = ["write_rows"]

_ROWS = 8  # rows of one program


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _write_rows_kernel(
    rows_ptr, slots_ptr, pages_ptr, num_rows, rows_stride, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    stored = slots >= 0
    lanes = tl.arange(0, LANES)[None, :]
    inside = stored[:, None] & (lanes < WIDTH)
    values = tl.load(rows_ptr + rows[:, None] * rows_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    store_rows(pages_ptr, slots, stored, values, WIDTH, ROPE, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, ROWS, LANES)


def write_rows(pages: Tensor, layout: PageLayout, slots_N: Tensor, rows_ND: Tensor) -> None:
    """Rounds and stores rows that are already normed and rotated.

    Args:
        pages: uint8 pages, written in place.
        layout: Of the pages.
        slots_N: int32 or int64 slots, each at most once; -1 writes nothing.
        rows_ND: (rows, width) float32 or bfloat16 values.
    """
    if rows_ND.shape[0]:
        rows_ND = rows_ND if rows_ND.stride(1) == 1 else rows_ND.contiguous()
        _write_rows_kernel[(triton.cdiv(rows_ND.shape[0], _ROWS),)](
            rows_ND, slots_N, pages, rows_ND.shape[0], rows_ND.stride(0), WIDTH=layout.width, ROPE=layout.rope_width,
            ROWS=_ROWS, LANES=max(64, triton.next_power_of_2(layout.width)), **row_constants(layout), num_warps=4,
        )  # fmt: skip
