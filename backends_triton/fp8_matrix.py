"""FP8 matrices in the dialect of their device, for kernels that multiply codes with codes; the portable one for others.

A model binds one kernel of `gemm.linear` for all of its matrices: what a library does not take (plain matrices, inputs
that are not rounded) goes to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halocline.backends_triton.block_scales import block_codes, block_scales
from halocline.backends_triton.device_facts import in_dialect_of
from halocline.backends_triton.gemm_triton import linear_triton, prepare_linear_triton
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops.gemm import PreparedWeight
from halocline.kernels_portable.quantize_activation import quantize_activation

__all__ = ["Fp8Matrix", "Fp8Product", "multiply", "prepare_matrix"]

# Codes (T, K) and scales (T, ceil(K / 128)) of the rows, the matrix, the element type of the result (T, N).
Fp8Product = Callable[[Tensor, Tensor, "Fp8Matrix", torch.dtype], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Fp8Matrix:
    """Contiguous E4M3 codes (N, K) and float32 scales (ceil(N / 128), ceil(K / 128)), for rounded inputs."""

    codes_NK: Tensor
    scale_NB: Tensor
    fp8_dialect: Literal["ocp", "fnuz"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (out, in)."""
        return tuple(self.codes_NK.shape)


def prepare_matrix(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """Converts a matrix once, at load; bytes and scales of an FP8 one change where its device reads FNUZ."""
    if weight.format is not WeightFormat.FP8_BLOCK or len(weight.shape) != 2 or activation != "fp8_group128":
        return prepare_linear_triton(weight, activation=activation)
    stored = in_dialect_of(weight, weight.data.device)
    return Fp8Matrix(codes_NK=block_codes(stored), scale_NB=block_scales(stored), fp8_dialect=stored.fp8_dialect)


def multiply(x_TK: Tensor, weight: PreparedWeight, out_dtype: torch.dtype | None, product: Fp8Product) -> Tensor:
    """Multiplies rows by the transpose of a matrix, an FP8 one by `product`."""
    if not isinstance(weight, Fp8Matrix):
        return linear_triton(x_TK, weight, out_dtype=out_dtype)
    if x_TK.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"rows of {x_TK.shape[-1]} lanes against a weight of shape {weight.shape}")
    out_dtype = out_dtype or x_TK.dtype
    if not x_TK.shape[0]:
        return torch.empty((0, weight.shape[0]), dtype=out_dtype, device=x_TK.device)
    codes, scales = quantize_activation(x_TK, fp8_dialect=weight.fp8_dialect)
    return product(codes, scales, weight, out_dtype)
