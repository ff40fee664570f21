"""FP8 products by aiter. T rows, K lanes in, N lanes out. Written after the recorded call; never run."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from halocline.backends_hip.library_calls import library_function
from halocline.backends_triton.fp8_matrix import Fp8Matrix, multiply, prepare_matrix
from halocline.hal.formats import Weight
from halocline.hal.op import implements
from halocline.hal.ops.gemm import PreparedWeight, linear, prepare_linear

__all__ = ["linear_aiter", "prepare_linear_aiter"]

_gemm_a8w8_blockscale = library_function("gemm_a8w8_blockscale")


@implements(prepare_linear)
def prepare_linear_aiter(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract."""
    return prepare_matrix(weight, activation=activation)


def _product(codes: Tensor, scales: Tensor, weight: Fp8Matrix, out_dtype: torch.dtype) -> Tensor:
    """The library's result is bfloat16."""
    out_TN: Tensor = _gemm_a8w8_blockscale(
        XQ=codes, WQ=weight.codes_NK, x_scale=scales, w_scale=weight.scale_NB, dtype=torch.bfloat16
    )
    return out_TN.to(out_dtype)


@implements(linear)
def linear_aiter(x_TK: Tensor, weight: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """See the contract."""
    return multiply(x_TK, weight, out_dtype, _product)
