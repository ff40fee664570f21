"""Products with stored matrices, out of the kernels of this package. T rows, G groups, N lanes out, K in, H heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from halocline.kernels_portable import thin_fp8_gemm
from halocline.kernels_portable.dense_gemm import dense_gemm
from halocline.kernels_portable.expert_alignment import ExpertBlocks
from halocline.kernels_portable.fp8_gemm import fp8_gemm
from halocline.kernels_portable.gemm_tiles import expert_tiles, gemm_tiles
from halocline.kernels_portable.grouped_gemm_fp4 import grouped_gemm_fp4
from halocline.kernels_portable.inverse_rope import rotate_back, rotate_back_and_quantize
from halocline.kernels_portable.quantize_activation import quantize_activation, round_activation
from halocline.kernels_portable.target import Target
from halocline.kernels_portable.thin_gemm import MOST_ROWS, thin_gemm

__all__ = ["StoredMatrices", "multiply", "project_outputs", "scales_of_groups"]


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredMatrices:
    """One matrix, or one for each group of input lanes.

    Attributes:
        format: `plain` (bfloat16 or float32), `fp8` (128 x 128 blocks) or `fp4` (MXFP4 or NVFP4, told apart by the
            number of scales; one group only).
        data: Contiguous (groups, N, K), or (groups, N, K / 2) packed pairs of `fp4`.
        scale: float32 (groups, ceil(N / 128), ceil(K / 128)) of `fp8`, bytes (groups, N, K / 32 or K / 16) of `fp4`.
        global_scale: float32 (1,), NVFP4 only.
        fp8_dialect: Of E4M3 codes in `data`.
    """

    format: Literal["plain", "fp8", "fp4"]
    data: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp"

    def __post_init__(self) -> None:
        """Checks that scales are there where the format needs them, and groups where it can have them."""
        if (self.scale is None) != (self.format == "plain"):
            raise ValueError(f"a matrix in {self.format} {'lacks' if self.scale is None else 'has'} scales")
        if self.format == "fp4" and self.data.shape[0] != 1:
            raise ValueError(f"{self.data.shape[0]} groups of FP4 matrices: only one is supported")


def scales_of_groups(scale_BC: Tensor, *, num_groups: int, rows: int) -> Tensor:
    """Scales of a (groups * rows, K) matrix, by group; several small groups may lie in one block of 128 rows.

    Args:
        scale_BC: float32 (blocks of rows, blocks of lanes).
        num_groups: Consecutive groups of rows.
        rows: Rows of a group; a multiple of 128, or a divisor of it.

    Returns:
        float32 (groups, ceil(rows / 128), blocks of lanes).
    """
    if num_groups == 1 or rows % 128 == 0:
        return scale_BC.view(num_groups, -1, scale_BC.shape[-1])
    if 128 % rows:
        raise ValueError(f"groups of {rows} rows: scales of 128 rows would straddle them")
    blocks = torch.arange(num_groups, device=scale_BC.device) * rows // 128
    return scale_BC.index_select(0, blocks)[:, None].contiguous()


def multiply(
    x_TK: Tensor,
    weight: StoredMatrices,
    *,
    rounds_input: bool,
    out_dtype: torch.dtype,
    target: Target,
    batch_invariant: bool,
) -> Tensor:
    """Multiplies rows by the transposes of stored matrices.

    Args:
        x_TK: (rows, groups * K) bfloat16 or float32.
        weight: The matrices.
        rounds_input: Whether rows are rounded to E4M3 in groups of 128 lanes; plain matrices never round.
        out_dtype: Element type of the result.
        target: Device.
        batch_invariant: Whether tiles must not depend on the number of rows.

    Returns:
        (rows, groups * N).
    """
    if weight.format == "fp4":
        x = round_activation(x_TK) if rounds_input else x_TK
        return _multiply_fp4(x, weight, out_dtype, target, batch_invariant)
    if weight.format == "fp8":
        if x_TK.shape[0] <= thin_fp8_gemm.MOST_ROWS and not batch_invariant:
            assert weight.scale is not None
            x = round_activation(x_TK) if rounds_input else x_TK
            return thin_fp8_gemm.thin_fp8_gemm(x, weight.data, weight.scale, out_dtype=out_dtype)
        x, scales = quantize_activation(x_TK, fp8_dialect=weight.fp8_dialect) if rounds_input else (x_TK, None)
        return _multiply_fp8(x, scales, weight, out_dtype, target, batch_invariant)
    if weight.data.shape[0] == 1 and x_TK.shape[0] <= MOST_ROWS and not batch_invariant:
        return thin_gemm(x_TK, weight.data[0], out_dtype=out_dtype)
    width = max(x_TK.element_size(), weight.data.element_size())
    tiles = gemm_tiles(target, num_rows=x_TK.shape[0], element_bytes=width, batch_invariant=batch_invariant)
    return dense_gemm(x_TK, weight.data, out_dtype=out_dtype, tiles=tiles)


def _multiply_fp8(
    x: Tensor,
    scales: Tensor | None,
    weight: StoredMatrices,
    out_dtype: torch.dtype,
    target: Target,
    batch_invariant: bool,
) -> Tensor:
    assert weight.scale is not None
    size = x.element_size()
    tiles = gemm_tiles(target, num_rows=x.shape[0], element_bytes=size, batch_invariant=batch_invariant)
    return fp8_gemm(x, scales, weight.data, weight.scale, out_dtype=out_dtype, tiles=tiles)


def _multiply_fp4(
    x: Tensor, weight: StoredMatrices, out_dtype: torch.dtype, target: Target, batch_invariant: bool
) -> Tensor:
    """One FP4 matrix is one expert that every row has chosen."""
    assert weight.scale is not None
    num_rows, size = x.shape[0], x.element_size()
    tiles = expert_tiles(target, mean_rows=num_rows, element_bytes=size, batch_invariant=batch_invariant)
    num_blocks = triton.cdiv(num_rows, tiles.rows)
    pairs = torch.arange(num_blocks * tiles.rows, dtype=torch.int32, device=x.device)
    experts = torch.zeros((num_blocks,), dtype=torch.int32, device=x.device)
    blocks = ExpertBlocks(torch.where(pairs < num_rows, pairs, -1), experts, tiles.rows)
    return grouped_gemm_fp4(
        x, weight.data, weight.scale, weight.global_scale, blocks, num_pairs=num_rows, out_dtype=out_dtype, tiles=tiles
    )


def project_outputs(
    out_THD: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    weight: StoredMatrices,
    *,
    rounds_input: bool,
    target: Target,
    batch_invariant: bool,
) -> Tensor:
    """Rotates attention outputs back at their positions and projects each group of heads.

    Args:
        out_THD: (tokens, heads, lanes) bfloat16 or float32.
        positions_T: int32 positions.
        cos_sin_PR: (positions, rotary lanes) float32 table.
        weight: (groups, group rank, heads / groups * lanes), plain or FP8.
        rounds_input: Whether rotated outputs are rounded to E4M3 in groups of 128 lanes; for FP8 matrices only.
        target: Device.
        batch_invariant: Whether tiles must not depend on the number of tokens.

    Returns:
        (tokens, groups * group rank) in the type of `out_THD`.
    """
    is_thin = out_THD.shape[0] <= thin_fp8_gemm.MOST_ROWS and not batch_invariant
    if rounds_input and weight.format == "fp8" and not is_thin:
        codes, scales = rotate_back_and_quantize(out_THD, positions_T, cos_sin_PR, fp8_dialect=weight.fp8_dialect)
        return _multiply_fp8(codes, scales, weight, out_THD.dtype, target, batch_invariant)
    rounds_input = rounds_input and weight.format == "fp8"
    rotated = rotate_back(out_THD, positions_T, cos_sin_PR, rounds=rounds_input).flatten(1)
    return multiply(
        rotated, weight, rounds_input=False, out_dtype=out_THD.dtype, target=target, batch_invariant=batch_invariant
    )
