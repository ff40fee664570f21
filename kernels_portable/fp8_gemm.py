"""Product of rows with an FP8 matrix in 128 x 128 blocks, for one matrix or one per group of lanes.

T rows, G groups, K lanes of a group, N output lanes. Rows are E4M3 codes with a scale for each 128 lanes, or plain
values, which are then multiplied as they are.

FP8 matrix units keep fewer bits of a sum than float32 has (about 1e-4 of it, measured on sm_90). A float32 result is
therefore summed from bfloat16 operands, in which every code is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.gemm_tiles import GemmTiles

__all__ = ["fp8_gemm"]


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_gemm_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, out_ptr, num_rows, x_stride, GROUPS: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    column_blocks: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    rows = (tl.program_id(0) // column_blocks) * ROWS + tl.arange(0, ROWS)
    first_column = (tl.program_id(0) % column_blocks) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    k_blocks: tl.constexpr = (K + 127) // 128
    n_blocks: tl.constexpr = (N + 127) // 128
    x_row = x_ptr + rows.to(tl.int64)[:, None] * x_stride + group * K
    weight_row = weight_ptr + (group * N + columns)[:, None] * K
    x_scale_row = x_scale_ptr + (rows.to(tl.int64) * GROUPS + group) * k_blocks
    weight_scale_row = weight_scale_ptr + (group * n_blocks + first_column // 128) * k_blocks
    row_inside = rows < num_rows
    column_inside = columns < N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, LANES):
        lanes = start + tl.arange(0, LANES)
        inside = (lanes < K)[None, :]
        x = tl.load(x_row + lanes[None, :], mask=row_inside[:, None] & inside, other=0.0)
        weight = tl.load(weight_row + lanes[None, :], mask=column_inside[:, None] & inside, other=0.0)
        scale = tl.load(weight_scale_row + start // 128)
        if SCALED:
            if out_ptr.dtype.element_ty == tl.float32:
                products = tl.dot(x.to(tl.bfloat16), tl.trans(weight.to(tl.bfloat16)), out_dtype=tl.float32)
            else:
                products = tl.dot(x, tl.trans(weight), out_dtype=tl.float32)
            row_scale = tl.load(x_scale_row + start // 128, mask=row_inside, other=0.0)
            total += products * (row_scale * scale)[:, None]
        else:
            total += tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="bf16x6", out_dtype=tl.float32) * scale
    out = out_ptr + (rows.to(tl.int64) * GROUPS + group)[:, None] * N + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


def fp8_gemm(
    x_TK: Tensor,
    x_scale_TB: Tensor | None,
    weight_GNK: Tensor,
    weight_scale_GNB: Tensor,
    *,
    out_dtype: torch.dtype,
    tiles: GemmTiles,
) -> Tensor:
    """Multiplies each group of a row's lanes by the transpose of that group's matrix.

    Args:
        x_TK: (rows, groups * K): float8 codes in the dialect of the weight, or bfloat16 or float32 values.
        x_scale_TB: float32 (rows, groups * ceil(K / 128)) for codes, None for values. Groups of codes must not
            straddle groups of lanes: K is a multiple of 128 where there are several.
        weight_GNK: Contiguous float8 (groups, N, K).
        weight_scale_GNB: Contiguous float32 (groups, ceil(N / 128), ceil(K / 128)).
        out_dtype: Element type of the result.
        tiles: From `gemm_tiles`.

    Returns:
        (rows, groups * N); float32 sums.
    """
    groups, n, k = weight_GNK.shape
    num_rows = x_TK.shape[0]
    if groups > 1 and k % 128:
        raise ValueError(f"groups of {k} lanes: scales of 128 lanes would straddle them")
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    out = torch.empty((num_rows, groups * n), dtype=out_dtype, device=x_TK.device)
    if num_rows:
        _fp8_gemm_kernel[(triton.cdiv(num_rows, tiles.rows) * triton.cdiv(n, tiles.columns), groups)](
            x_TK, x_scale_TB if x_scale_TB is not None else weight_scale_GNB, weight_GNK, weight_scale_GNB, out,
            num_rows, x_TK.stride(0), GROUPS=groups, K=k, N=n, SCALED=x_scale_TB is not None, ROWS=tiles.rows,
            COLUMNS=tiles.columns, LANES=min(tiles.lanes, 128), num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
    return out
