"""FP8 products by the portable tilelang kernel. T rows, K lanes in, N lanes out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from halocline.backends_triton.fp8_matrix import Fp8Matrix, multiply, prepare_matrix
from halocline.hal.formats import Weight
from halocline.hal.op import implements
from halocline.hal.ops.gemm import PreparedWeight, linear, prepare_linear
from halocline.kernels_portable.target import target_of
from halocline.kernels_portable.tilelang_fp8_gemm import fp8_gemm_tilelang

__all__ = ["linear_tilelang", "prepare_linear_tilelang"]


@implements(prepare_linear)
def prepare_linear_tilelang(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract."""
    return prepare_matrix(weight, activation=activation)


def _product(codes: Tensor, scales: Tensor, weight: Fp8Matrix, out_dtype: torch.dtype) -> Tensor:
    target = target_of(codes.device)
    return fp8_gemm_tilelang(codes, scales, weight.codes_NK, weight.scale_NB, out_dtype=out_dtype, target=target)


@implements(linear)
def linear_tilelang(x_TK: Tensor, weight: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """See the contract."""
    return multiply(x_TK, weight, out_dtype, _product)
