"""Dense products: FP8 blocks by DeepGEMM, plain matrices by cuBLAS. T rows, K lanes in, N lanes out."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from halocline.backends_cuda.manifest import DEEP_GEMM
from halocline.backends_triton.gemm_triton import TritonWeight, linear_triton, prepare_weight
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight
from halocline.hal.op import implements
from halocline.hal.ops.gemm import PreparedWeight, linear, prepare_linear
from halocline.hal.runtime import import_provider
from halocline.hal.step_sizes import row_runs
from halocline.kernels_portable import thin_fp8_gemm
from halocline.kernels_portable.quantize_activation import ScaleOrder, quantize_activation
from halocline.kernels_portable.thin_gemm import MOST_ROWS, thin_gemm

__all__ = ["SCALE_ORDER", "deep_gemm", "linear_deep_gemm", "prepare_linear_deep_gemm"]

SCALE_ORDER: ScaleOrder = "groups"  # any other order is brought into this one by a launch in each product
_SHORT = 8192  # output lanes


def deep_gemm() -> Any:
    """The library that selection chose, imported."""
    return import_provider(DEEP_GEMM)


@implements(prepare_linear)
def prepare_linear_deep_gemm(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract. Weights stay as the checkpoint has them; scales become float32."""
    return prepare_weight(weight, activation=activation)


@implements(linear)
def linear_deep_gemm(x_TK: Tensor, weight: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """See the contract. DeepGEMM gives bfloat16; other results of FP8 weights come from the portable kernel.

    So does a single row, whose product is bound by loads that a tile of 16 rows leaves too little room for. The library
    sees few numbers of rows, as it compiles each apart.
    """
    assert isinstance(weight, TritonWeight)
    if x_TK.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"rows of {x_TK.shape[-1]} lanes against a weight of shape {weight.shape}")
    out_dtype = out_dtype or x_TK.dtype
    if weight.scale is None:
        return _plain(x_TK, weight.data, out_dtype)
    if out_dtype != torch.bfloat16 or not weight.rounds_input or x_TK.shape[0] <= thin_fp8_gemm.MOST_ROWS:
        return linear_triton(x_TK, weight, out_dtype=out_dtype)
    runs = row_runs(x_TK.shape[0])
    out_TN = torch.empty((sum(run.padded for run in runs), weight.shape[0]), dtype=out_dtype, device=x_TK.device)
    for start, count, padded in runs:
        rows = quantize_activation(
            x_TK[start : start + count], fp8_dialect="ocp", scale_order=SCALE_ORDER, padded_rows=padded
        )
        out = out_TN[start : start + padded]
        deep_gemm().fp8_gemm_nt(rows, (weight.data, weight.scale), out, disable_ue8m0_cast=True)
    return out_TN[: x_TK.shape[0]]


def _plain(x_TK: Tensor, matrix_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """bfloat16 operands are multiplied as such, with float32 sums; anything else in float32.

    For few rows cuBLAS divides K and takes two launches, but for matrices as long as a vocabulary.
    """
    if x_TK.shape[0] <= MOST_ROWS and matrix_NK.shape[0] <= _SHORT:
        return thin_gemm(x_TK, matrix_NK, out_dtype=out_dtype)
    if x_TK.dtype == matrix_NK.dtype == torch.bfloat16:
        if out_dtype == torch.float32 and x_TK.is_cuda:
            return torch.mm(x_TK, matrix_NK.T, out_dtype=torch.float32)
        if out_dtype == torch.bfloat16:
            return x_TK @ matrix_NK.T
    return (x_TK.float() @ matrix_NK.float().T).to(out_dtype)
