"""Product of one row with an FP8 matrix in 128 x 128 blocks, for one matrix or one per group of lanes.

T rows, G groups, K lanes of a group, N output lanes. One row is bound by the bytes of the matrix, so that a program
asks for many of them at a time and computes in between; no matrix unit would have anything to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MOST_ROWS", "thin_fp8_gemm"]

MOST_ROWS = 1  # each row reads the whole matrix
_LANES, _FEW_LANES = 2048, 1024  # lanes of K of a step, at most


@triton.jit
def _thin_fp8_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, out_ptr, num_rows, x_stride, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    first_column = tl.program_id(0) // num_rows * COLUMNS
    group = tl.program_id(1).to(tl.int64)
    k_blocks: tl.constexpr = (K + 127) // 128
    n_blocks: tl.constexpr = (N + 127) // 128
    columns = first_column + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, LANES)[None, :]
    x_row = x_ptr + row * x_stride + group * K
    weight_row = weight_ptr + (group * N + columns)[:, None] * K
    scale_row = scale_ptr + (group * n_blocks + first_column // 128) * k_blocks
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, K, LANES):
        lane = start + lanes
        inside = lane < K
        weight = tl.load(weight_row + lane, mask=(columns < N)[:, None] & inside, other=0.0)
        x = tl.load(x_row + lane, mask=inside, other=0.0).to(tl.float32)
        scaled = x * tl.load(scale_row + lane // 128, mask=inside, other=0.0)
        total += tl.sum(weight.to(tl.float32) * scaled, axis=1)
    place = (row * GROUPS + group) * N + columns
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=columns < N)


def thin_fp8_gemm(x_TK: Tensor, weight_GNK: Tensor, scale_GNB: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Multiplies each group of a row's lanes by the transpose of that group's matrix, with float32 sums.

    Args:
        x_TK: (rows, groups * K) bfloat16 or float32; up to `MOST_ROWS` are worth it. Values, rounded where the product
            is one of rounded rows.
        weight_GNK: Contiguous float8 (groups, N, K).
        scale_GNB: Contiguous float32 (groups, ceil(N / 128), ceil(K / 128)).
        out_dtype: Element type of the result.

    Returns:
        (rows, groups * N).
    """
    groups, n, k = weight_GNK.shape
    num_rows = x_TK.shape[0]
    if groups > 1 and k % 128:
        raise ValueError(f"groups of {k} lanes: scales of 128 lanes would straddle them")
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    out = torch.empty((num_rows, groups * n), dtype=out_dtype, device=x_TK.device)
    if num_rows:
        # Few enough columns to fill a device. Small programs are ahead where there are many, large ones in long rows.
        columns = 8 if groups * n >= 2048 else 4
        is_small = k <= _FEW_LANES or groups > 1
        _thin_fp8_gemm_kernel[(triton.cdiv(n, columns) * num_rows, groups)](
            x_TK, weight_GNK, scale_GNB, out, num_rows, x_TK.stride(0), GROUPS=groups, K=k, N=n, COLUMNS=columns,
            LANES=min(_FEW_LANES if is_small else _LANES, max(128, triton.next_power_of_2(k))),
            num_warps=2 if is_small else 4,
        )  # fmt: skip
    return out
