"""Product of E4M3 rows with an E4M3 matrix in 128 x 128 blocks, in tilelang. T rows, K lanes in, N lanes out."""

from __future__ import annotations

from typing import Any

import tilelang.language as T  # noqa: N812 (its own idiom)
import torch
from torch import Tensor

from halocline.kernels_portable.target import Target
from halocline.kernels_portable.tilelang_program import compiled, jit_program, num_threads

__all__ = ["fp8_gemm_program", "fp8_gemm_tilelang", "row_tile"]

_BLOCK = 128
_ELEMENTS = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e4m3fnuz: "float8_e4m3fnuz"}
_RESULTS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def row_tile(num_rows: int) -> int:
    """Rows of a program: few tiles of few rows while the matrix is the larger part of the traffic."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def fp8_gemm_program(n: int, k: int, element: str, result: str, rows: int, threads: int) -> Any:
    """The program for a matrix of (n, k) `element` codes and tiles of `rows` rows by 128 columns."""
    num_rows = T.dynamic("num_rows")
    blocks = -(-k // _BLOCK)

    @jit_program(
        x=T.Tensor((num_rows, k), element),
        x_scale=T.Tensor((num_rows, blocks), "float32"),
        weight=T.Tensor((n, k), element),
        weight_scale=T.Tensor((-(-n // _BLOCK), blocks), "float32"),
        out=T.Tensor((num_rows, n), result),
    )
    def fp8_gemm(x, x_scale, weight, weight_scale, out):
        with T.Kernel(T.ceildiv(n, _BLOCK), T.ceildiv(num_rows, rows), threads=threads) as (column_block, row_block):
            x_s = T.alloc_shared((rows, _BLOCK), element)
            weight_s = T.alloc_shared((_BLOCK, _BLOCK), element)
            scale_s = T.alloc_shared((rows,), "float32")
            part = T.alloc_fragment((rows, _BLOCK), "float32")
            total = T.alloc_fragment((rows, _BLOCK), "float32")
            T.clear(total)
            for block in T.serial(blocks):
                T.copy(x[row_block * rows, block * _BLOCK], x_s)
                T.copy(weight[column_block * _BLOCK, block * _BLOCK], weight_s)
                for r in T.Parallel(rows):
                    row_scale = T.if_then_else(
                        row_block * rows + r < num_rows, x_scale[row_block * rows + r, block], 0.0
                    )
                    scale_s[r] = row_scale * weight_scale[column_block, block]
                T.clear(part)
                T.gemm(x_s, weight_s, part, transpose_B=True)
                for r, c in T.Parallel(rows, _BLOCK):
                    total[r, c] += part[r, c] * scale_s[r]
            T.copy(total, out[row_block * rows, column_block * _BLOCK])

    return fp8_gemm


def fp8_gemm_tilelang(
    x_TK: Tensor,
    x_scale_TB: Tensor,
    weight_NK: Tensor,
    weight_scale_NB: Tensor,
    *,
    out_dtype: torch.dtype,
    target: Target,
) -> Tensor:
    """Multiplies rows of codes by the transpose of a matrix of codes of the same dialect.

    Args:
        x_TK: Contiguous E4M3 codes; K is a multiple of 16.
        x_scale_TB: Contiguous float32 (rows, ceil(K / 128)).
        weight_NK: Contiguous E4M3 codes; N is a multiple of 16.
        weight_scale_NB: Contiguous float32 (ceil(N / 128), ceil(K / 128)).
        out_dtype: bfloat16 or float32.
        target: Device.

    Returns:
        (rows, N); float32 sums.
    """
    (n, k), num_rows = weight_NK.shape, x_TK.shape[0]
    if x_TK.dtype != weight_NK.dtype or n % 16 or k % 16:
        raise ValueError(f"{x_TK.dtype} rows against ({n}, {k}) {weight_NK.dtype}: one dialect, 16 lanes at a time")
    out = torch.empty((num_rows, n), dtype=out_dtype, device=x_TK.device)
    if num_rows:
        kernel = compiled(
            fp8_gemm_program,
            n,
            k,
            _ELEMENTS[weight_NK.dtype],
            _RESULTS[out_dtype],
            row_tile(num_rows),
            num_threads(target.wave_size),
        )
        kernel(x_TK, x_scale_TB, weight_NK, weight_scale_NB, out)
    return out
