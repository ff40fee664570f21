"""Product of rows with a plain matrix, for one matrix or one per group of lanes, with float32 sums.

T rows, G groups, K lanes of a group, N output lanes. Two bfloat16 operands are multiplied as such, anything else with
float32 quality.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.gemm_tiles import GemmTiles

__all__ = ["dense_gemm"]


@triton.jit(do_not_specialize=["num_rows"])
def _dense_gemm_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, x_stride, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    column_blocks: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    rows = (tl.program_id(0) // column_blocks) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and weight_ptr.dtype.element_ty == tl.bfloat16
    KIND: tl.constexpr = tl.bfloat16 if NARROW else tl.float32
    x_row = x_ptr + rows.to(tl.int64)[:, None] * x_stride + group * K
    weight_row = weight_ptr + (group * N + columns)[:, None] * K
    row_inside = (rows < num_rows)[:, None]
    column_inside = (columns < N)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, LANES):
        lanes = start + tl.arange(0, LANES)
        inside = (lanes < K)[None, :]
        x = tl.load(x_row + lanes[None, :], mask=row_inside & inside, other=0.0).to(KIND)
        weight = tl.load(weight_row + lanes[None, :], mask=column_inside & inside, other=0.0).to(KIND)
        total = tl.dot(x, tl.trans(weight), total, input_precision="bf16x6")
    out = out_ptr + (rows.to(tl.int64) * GROUPS + group)[:, None] * N + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_inside & (columns < N)[None, :])


def dense_gemm(x_TK: Tensor, weight_GNK: Tensor, *, out_dtype: torch.dtype, tiles: GemmTiles) -> Tensor:
    """Multiplies each group of a row's lanes by the transpose of that group's matrix.

    Args:
        x_TK: (rows, groups * K) bfloat16 or float32.
        weight_GNK: Contiguous (groups, N, K) bfloat16 or float32.
        out_dtype: Element type of the result.
        tiles: From `gemm_tiles`.

    Returns:
        (rows, groups * N); float32 sums.
    """
    groups, n, k = weight_GNK.shape
    num_rows = x_TK.shape[0]
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    out = torch.empty((num_rows, groups * n), dtype=out_dtype, device=x_TK.device)
    if num_rows:
        _dense_gemm_kernel[(triton.cdiv(num_rows, tiles.rows) * triton.cdiv(n, tiles.columns), groups)](
            x_TK, weight_GNK, out, num_rows, x_TK.stride(0), GROUPS=groups, K=k, N=n, ROWS=tiles.rows,
            COLUMNS=tiles.columns, LANES=tiles.lanes, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out
