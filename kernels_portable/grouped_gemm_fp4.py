"""Grouped product with E2M1 experts in their checkpoint bytes (MXFP4, NVFP4). P pairs, E experts, N lanes out, K in.

Codes become float16 by placing their bits, are scaled in float32 and are exact in bfloat16. The weight is the left
operand, so that few tokens fill a matrix instruction's narrow side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.expert_alignment import ExpertBlocks
from halocline.kernels_portable.gemm_tiles import GemmTiles
from halocline.kernels_portable.number_codes import decode_e4m3, exact_bfloat16, power_of_two, split_float32

__all__ = ["grouped_gemm_fp4"]


@triton.jit
def _fp4_tile(
    weight_ptr, scale_ptr, inside, first_lane, GROUP: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr
):
    """bfloat16 values (COLUMNS, LANES) of rows whose codes and scales begin at the given pointers (COLUMNS,)."""
    byte = tl.arange(0, LANES // 2)[None, :]
    packed = tl.load(weight_ptr[:, None] + first_lane // 2 + byte, mask=inside[:, None], other=0).to(tl.uint16)
    low = ((packed & 0x7) << 9) | ((packed & 0x8) << 12)
    high = ((packed & 0x70) << 5) | ((packed & 0x80) << 8)
    halves = tl.reshape(tl.join(low, high), (COLUMNS, LANES // GROUP, GROUP)).to(tl.float16, bitcast=True)
    group = tl.arange(0, LANES // GROUP)[None, :]
    scales = tl.load(scale_ptr[:, None] + first_lane // GROUP + group, mask=inside[:, None], other=0)
    if GROUP == 32:  # noqa: SIM108 (decided at compile time)
        steps = power_of_two(scales.to(tl.int32) - (127 - 14))
    else:
        steps = decode_e4m3(scales, False) * 16384.0
    return tl.reshape(exact_bfloat16(halves.to(tl.float32) * steps[:, :, None]), (COLUMNS, LANES))


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped_gemm_fp4_kernel(
    x_ptr, weight_ptr, scale_ptr, global_scale_ptr, out_ptr, pairs_ptr, experts_ptr, num_blocks, x_stride,
    PAIRS_OF_A_ROW: tl.constexpr, K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % num_blocks
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(pairs_ptr + block * ROWS + tl.arange(0, ROWS))
    present = pairs >= 0
    columns = (tl.program_id(0) // num_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    weight_row = weight_ptr + (expert * N + columns) * (K // 2)
    scale_row = scale_ptr + (expert * N + columns) * (K // GROUP)
    x_row = x_ptr + (pairs // PAIRS_OF_A_ROW).to(tl.int64)[:, None] * x_stride
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, K, LANES):
        lanes = start + tl.arange(0, LANES)[None, :]
        x = tl.load(x_row + lanes, mask=present[:, None], other=0.0)
        weight = _fp4_tile(weight_row, scale_row, inside, start, GROUP, COLUMNS, LANES)
        if x.dtype == tl.bfloat16:
            total = tl.dot(weight, tl.trans(x), total)
        else:
            high, middle, low = split_float32(x)
            total = tl.dot(weight, tl.trans(low), total)
            total = tl.dot(weight, tl.trans(middle), total)
            total = tl.dot(weight, tl.trans(high), total)
    if GROUP == 16:
        total *= tl.load(global_scale_ptr + expert)
    out = out_ptr + pairs.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, tl.trans(total).to(out_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])


def grouped_gemm_fp4(
    x_RK: Tensor,
    weight_ENK: Tensor,
    scale_ENG: Tensor,
    global_scale_E: Tensor | None,
    blocks: ExpertBlocks,
    *,
    num_pairs: int,
    out_dtype: torch.dtype,
    tiles: GemmTiles,
) -> Tensor:
    """Multiplies the row of each pair by the transpose of its expert's matrix.

    Args:
        x_RK: (rows, K) bfloat16 or float32; a row serves num_pairs / rows consecutive pairs.
        weight_ENK: Contiguous uint8 (experts, N, K / 2), even lanes in the low nibble.
        scale_ENG: Contiguous uint8 scales: UE8M0 for groups of 32 lanes (MXFP4), E4M3 for 16 (NVFP4).
        global_scale_E: float32, NVFP4 only.
        blocks: From `align_experts` with `tiles.rows` rows.
        num_pairs: Pairs; a multiple of the rows.
        out_dtype: Element type of the result.
        tiles: From `gemm_tiles`.

    Returns:
        (pairs, N); rows of pairs without an expert are undefined.
    """
    n, k = weight_ENK.shape[1], weight_ENK.shape[2] * 2
    group = k // scale_ENG.shape[2]
    if k % 32:
        raise ValueError(f"experts of {k} input lanes: a multiple of 32 is needed")
    lanes = min(tiles.lanes, k & -k)  # a power of two that divides K
    x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    out = torch.empty((num_pairs, n), dtype=out_dtype, device=x_RK.device)
    if num_pairs:
        num_blocks = blocks.experts_B.shape[0]
        _grouped_gemm_fp4_kernel[(num_blocks * triton.cdiv(n, tiles.columns),)](
            x_RK, weight_ENK.view(torch.uint8), scale_ENG.view(torch.uint8),
            global_scale_E if global_scale_E is not None else scale_ENG, out, blocks.pairs_N, blocks.experts_B,
            num_blocks, x_RK.stride(0), PAIRS_OF_A_ROW=num_pairs // x_RK.shape[0], K=k, N=n, GROUP=group,
            ROWS=blocks.rows, COLUMNS=tiles.columns, LANES=lanes, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
    return out
