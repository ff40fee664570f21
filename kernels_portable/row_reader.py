"""Gather of cached rows as values, in every row format. N rows, D lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.page_rows import PageLayout, load_rows, row_constants

__all__ = ["read_rows"]

_ROWS = 4  # rows of one program


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _read_rows_kernel(
    pages_ptr, slots_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    values = load_rows(
        pages_ptr, slots, slots >= 0, WIDTH, ROPE, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, ROWS, LANES,
        out_ptr.dtype.element_ty,
    )  # fmt: skip
    lanes = tl.arange(0, LANES)[None, :]
    tl.store(out_ptr + rows[:, None] * WIDTH + lanes, values, mask=(rows < num_rows)[:, None] & (lanes < WIDTH))


def read_rows(
    pages: Tensor,
    layout: PageLayout,
    slots_N: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    out_ND: Tensor | None = None,
) -> Tensor:
    """Reads rows as values after the round trip of their format.

    Args:
        pages: uint8 pages.
        layout: Of the pages.
        slots_N: int32 or int64 slots; -1 reads zeros.
        dtype: Element type of a new result.
        out_ND: Where to put the values instead, for example a bfloat16 workspace; contiguous (rows, width).

    Returns:
        (rows, width).
    """
    num_rows = slots_N.shape[0]
    out = out_ND if out_ND is not None else torch.empty((num_rows, layout.width), dtype=dtype, device=pages.device)
    if num_rows:
        _read_rows_kernel[(triton.cdiv(num_rows, _ROWS),)](
            pages, slots_N, out, num_rows, WIDTH=layout.width, ROPE=layout.rope_width, ROWS=_ROWS,
            LANES=max(64, triton.next_power_of_2(layout.width)), **row_constants(layout), num_warps=4,
        )  # fmt: skip
    return out
