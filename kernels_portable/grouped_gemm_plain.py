"""Grouped product with plain experts (bfloat16 or float32). P pairs, E experts, N lanes out, K in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.expert_alignment import ExpertBlocks
from halocline.kernels_portable.gemm_tiles import GemmTiles

__all__ = ["grouped_gemm_plain"]


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped_gemm_plain_kernel(
    x_ptr, weight_ptr, out_ptr, pairs_ptr, experts_ptr, num_blocks, x_stride, PAIRS_OF_A_ROW: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % num_blocks
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(pairs_ptr + block * ROWS + tl.arange(0, ROWS))
    present = pairs >= 0
    columns = (tl.program_id(0) // num_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and weight_ptr.dtype.element_ty == tl.bfloat16
    KIND: tl.constexpr = tl.bfloat16 if NARROW else tl.float32
    x_row = x_ptr + (pairs // PAIRS_OF_A_ROW).to(tl.int64)[:, None] * x_stride
    weight_row = weight_ptr + (expert * N + columns)[:, None] * K
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, K, LANES):
        lanes = start + tl.arange(0, LANES)[None, :]
        x = tl.load(x_row + lanes, mask=present[:, None] & (lanes < K), other=0.0).to(KIND)
        weight = tl.load(weight_row + lanes, mask=inside[:, None] & (lanes < K), other=0.0).to(KIND)
        total = tl.dot(weight, tl.trans(x), total, input_precision="bf16x6")
    out = out_ptr + pairs.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, tl.trans(total).to(out_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])


def grouped_gemm_plain(
    x_RK: Tensor, weight_ENK: Tensor, blocks: ExpertBlocks, *, num_pairs: int, out_dtype: torch.dtype, tiles: GemmTiles
) -> Tensor:
    """Multiplies the row of each pair by the transpose of its expert's matrix.

    Args:
        x_RK: (rows, K) bfloat16 or float32; a row serves num_pairs / rows consecutive pairs.
        weight_ENK: Contiguous (experts, N, K) bfloat16 or float32.
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
        _grouped_gemm_plain_kernel[(num_blocks * triton.cdiv(n, tiles.columns),)](
            x_RK, weight_ENK, out, blocks.pairs_N, blocks.experts_B, num_blocks, x_RK.stride(0),
            PAIRS_OF_A_ROW=num_pairs // x_RK.shape[0], K=k, N=n, ROWS=blocks.rows, COLUMNS=tiles.columns,
            LANES=tiles.lanes, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out
