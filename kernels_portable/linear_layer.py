"""Products with stored matrices, out of the kernels of this package. T rows, G groups, N lanes out, K in, H heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halocline.kernels_portable.dense_gemm import dense_gemm
from halocline.kernels_portable.fp8_gemm import fp8_gemm
from halocline.kernels_portable.gemm_tiles import gemm_tiles
from halocline.kernels_portable.inverse_rope import rotate_back, rotate_back_and_quantize
from halocline.kernels_portable.quantize_activation import quantize_activation
from halocline.kernels_portable.target import Target

__all__ = ["StoredMatrices", "float_scales", "multiply", "project_outputs"]


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredMatrices:
    """One matrix, or one for each group of input lanes.

    Attributes:
        data: Contiguous (groups, N, K): bfloat16 or float32, or float8 codes.
        scale: float32 (groups, ceil(N / 128), ceil(K / 128)) of codes, None otherwise.
        fp8_dialect: Of the codes.
    """

    data: Tensor
    scale: Tensor | None = None
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp"


def float_scales(scale: Tensor) -> Tensor:
    """float32 block scales of float32 ones or of UE8M0 bytes (uint8 or float8_e8m0fnu)."""
    if scale.dtype == torch.float32:
        return scale.contiguous()
    return torch.exp2(scale.contiguous().view(torch.uint8).float() - 127)


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
        rounds_input: Whether rows are rounded to E4M3 in groups of 128 lanes; for FP8 matrices only.
        out_dtype: Element type of the result.
        target: Device.
        batch_invariant: Whether tiles must not depend on the number of rows.

    Returns:
        (rows, groups * N).
    """
    if weight.scale is None:
        width = max(x_TK.element_size(), weight.data.element_size())
        tiles = gemm_tiles(target, num_rows=x_TK.shape[0], element_bytes=width, batch_invariant=batch_invariant)
        return dense_gemm(x_TK, weight.data, out_dtype=out_dtype, tiles=tiles)
    codes, scales = quantize_activation(x_TK, fp8_dialect=weight.fp8_dialect) if rounds_input else (x_TK, None)
    return _multiply_fp8(codes, scales, weight, out_dtype, target, batch_invariant)


def _multiply_fp8(
    x: Tensor,
    scales: Tensor | None,
    weight: StoredMatrices,
    out_dtype: torch.dtype,
    target: Target,
    batch_invariant: bool,
) -> Tensor:
    assert weight.scale is not None
    tiles = gemm_tiles(target, num_rows=x.shape[0], element_bytes=x.element_size(), batch_invariant=batch_invariant)
    return fp8_gemm(x, scales, weight.data, weight.scale, out_dtype=out_dtype, tiles=tiles)


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
        weight: (groups, group rank, heads / groups * lanes).
        rounds_input: Whether rotated outputs are rounded to E4M3 in groups of 128 lanes; for FP8 matrices only.
        target: Device.
        batch_invariant: Whether tiles must not depend on the number of tokens.

    Returns:
        (tokens, groups * group rank) in the type of `out_THD`.
    """
    if rounds_input and weight.scale is not None:
        codes, scales = rotate_back_and_quantize(out_THD, positions_T, cos_sin_PR, fp8_dialect=weight.fp8_dialect)
        return _multiply_fp8(codes, scales, weight, out_THD.dtype, target, batch_invariant)
    rotated = rotate_back(out_THD, positions_T, cos_sin_PR).flatten(1)
    return multiply(
        rotated, weight, rounds_input=False, out_dtype=out_THD.dtype, target=target, batch_invariant=batch_invariant
    )
