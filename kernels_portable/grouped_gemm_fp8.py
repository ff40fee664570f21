"""Grouped product with FP8 experts in 128 x 128 blocks. P pairs, E experts, N lanes out, K in.

Rows are E4M3 codes with a scale for each 128 lanes, or plain values, which are then multiplied as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.expert_alignment import ExpertBlocks
from halocline.kernels_portable.gemm_tiles import GemmTiles

__all__ = ["grouped_gemm_fp8"]


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped_gemm_fp8_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, out_ptr, pairs_ptr, experts_ptr, num_blocks, x_stride,
    PAIRS_OF_A_ROW: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % num_blocks
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(pairs_ptr + block * ROWS + tl.arange(0, ROWS))
    present = pairs >= 0
    first_column = (tl.program_id(0) // num_blocks) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = columns < N
    k_blocks: tl.constexpr = (K + 127) // 128
    n_blocks: tl.constexpr = (N + 127) // 128
    rows = (pairs // PAIRS_OF_A_ROW).to(tl.int64)
    x_row = x_ptr + rows[:, None] * x_stride
    weight_row = weight_ptr + (expert * N + columns)[:, None] * K
    weight_scale_row = weight_scale_ptr + (expert * n_blocks + first_column // 128) * k_blocks
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, K, LANES):
        lanes = start + tl.arange(0, LANES)[None, :]
        x = tl.load(x_row + lanes, mask=present[:, None] & (lanes < K), other=0.0)
        weight = tl.load(weight_row + lanes, mask=inside[:, None] & (lanes < K), other=0.0)
        scale = tl.load(weight_scale_row + start // 128)
        if SCALED:
            row_scale = tl.load(x_scale_ptr + rows * k_blocks + start // 128, mask=present, other=0.0)
            total += tl.dot(weight, tl.trans(x), out_dtype=tl.float32) * (row_scale * scale)[None, :]
        else:
            total += tl.dot(weight.to(x.dtype), tl.trans(x), input_precision="bf16x6", out_dtype=tl.float32) * scale
    out = out_ptr + pairs.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, tl.trans(total).to(out_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])


def grouped_gemm_fp8(
    x_RK: Tensor,
    x_scale_RB: Tensor | None,
    weight_ENK: Tensor,
    weight_scale_ENB: Tensor,
    blocks: ExpertBlocks,
    *,
    num_pairs: int,
    out_dtype: torch.dtype,
    tiles: GemmTiles,
) -> Tensor:
    """Multiplies the row of each pair by the transpose of its expert's matrix.

    Args:
        x_RK: (rows, K): float8 codes in the dialect of the weight, or bfloat16 or float32 values; a row serves
            num_pairs / rows consecutive pairs.
        x_scale_RB: Contiguous float32 (rows, ceil(K / 128)) for codes, None for values.
        weight_ENK: Contiguous float8 (experts, N, K).
        weight_scale_ENB: Contiguous float32 (experts, ceil(N / 128), ceil(K / 128)).
        blocks: From `align_experts` with `tiles.rows` rows.
        num_pairs: Pairs; a multiple of the rows.
        out_dtype: Element type of the result.
        tiles: From `gemm_tiles`.

    Returns:
        (pairs, N); rows of pairs without an expert are undefined.
    """
    _, n, k = weight_ENK.shape
    x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    out = torch.empty((num_pairs, n), dtype=out_dtype, device=x_RK.device)
    if num_pairs:
        num_blocks = blocks.experts_B.shape[0]
        _grouped_gemm_fp8_kernel[(num_blocks * triton.cdiv(n, tiles.columns),)](
            x_RK, x_scale_RB if x_scale_RB is not None else weight_scale_ENB, weight_ENK, weight_scale_ENB, out,
            blocks.pairs_N, blocks.experts_B, num_blocks, x_RK.stride(0), PAIRS_OF_A_ROW=num_pairs // x_RK.shape[0],
            K=k, N=n, SCALED=x_scale_RB is not None, ROWS=blocks.rows, COLUMNS=tiles.columns,
            LANES=min(tiles.lanes, 128), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out
