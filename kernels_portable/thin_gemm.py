"""Product of a few rows with a plain matrix: each program sums some output lanes over all of K.

T rows, N lanes out, K in. Few rows leave a matrix unit idle, and a divided K needs a second launch. Here a program
keeps a sum for each of its lanes of K and adds them up once, so that all of its loads are under way at the same time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MOST_ROWS", "thin_gemm"]

MOST_ROWS = 2  # each row reads the matrix, the second from a cache
_LANES = 1024  # lanes of K of a step


@triton.jit
def _thin_gemm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, K: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = weight_ptr + columns.to(tl.int64)[:, None] * K
    total = tl.zeros((COLUMNS, LANES), tl.float32)
    for start in tl.static_range(0, K, LANES):
        lanes = start + tl.arange(0, LANES)[None, :]
        x = tl.load(x_ptr + row * x_stride + lanes, mask=lanes < K, other=0.0)
        weight = tl.load(weight_row + lanes, mask=(columns < N)[:, None] & (lanes < K), other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)
    out = tl.sum(total, axis=1)
    tl.store(out_ptr + row * N + columns, out.to(out_ptr.dtype.element_ty), mask=columns < N)


def thin_gemm(x_TK: Tensor, weight_NK: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Multiplies rows by the transpose of a matrix, with float32 sums of float32 products.

    Args:
        x_TK: (rows, K) bfloat16 or float32; up to `MOST_ROWS` are worth it.
        weight_NK: Contiguous (N, K) bfloat16 or float32.
        out_dtype: Element type of the result.

    Returns:
        (rows, N).
    """
    num_rows, (n, k) = x_TK.shape[0], weight_NK.shape
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    out = torch.empty((num_rows, n), dtype=out_dtype, device=x_TK.device)
    if num_rows:
        columns = 4 if n >= 1024 else 2 if n >= 256 else 1
        _thin_gemm_kernel[(triton.cdiv(n, columns), num_rows)](
            x_TK, weight_NK, out, x_TK.stride(0), K=k, N=n, COLUMNS=columns,
            LANES=min(_LANES, triton.next_power_of_2(k)), num_warps=4,
        )  # fmt: skip
    return out
