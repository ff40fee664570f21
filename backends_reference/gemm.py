"""Reference products: weights are dequantized once, at load, and multiplied in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halocline.hal import weight_codecs
from halocline.hal.codecs import round_trip_fp8
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.op import implements
from halocline.hal.ops.gemm import PreparedWeight, linear, prepare_linear

__all__ = ["ReferenceWeight", "dequantize", "linear_reference", "prepare_linear_reference", "round_activation"]

_PLAIN = (WeightFormat.FLOAT32, WeightFormat.BFLOAT16)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReferenceWeight:
    """A float32 matrix.

    Attributes:
        matrix_NK: float32 values.
        rounds_input: Whether inputs are rounded to E4M3 in groups of 128.
    """

    matrix_NK: Tensor
    rounds_input: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return tuple(self.matrix_NK.shape)


def dequantize(weight: Weight) -> Tensor:
    """The float32 values of a stored weight; differentiable for plain formats."""
    if weight.format in _PLAIN:
        return weight.data.float()
    return weight_codecs.dequantize(weight)


def round_activation(x_TK: Tensor) -> Tensor:
    """E4M3 round trip in groups of 128 lanes; a narrower last group is a group of its own."""
    return round_trip_fp8(x_TK, 128)


@implements(prepare_linear)
def prepare_linear_reference(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract."""
    rounds = activation == "fp8_group128" and weight.format not in _PLAIN
    return ReferenceWeight(matrix_NK=dequantize(weight), rounds_input=rounds)


@implements(linear)
def linear_reference(x_TK: Tensor, weight: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """See the contract."""
    assert isinstance(weight, ReferenceWeight)
    if x_TK.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"rows of {x_TK.shape[-1]} lanes against a weight of shape {weight.shape}")
    x = x_TK.float()
    if weight.rounds_input:
        x = round_activation(x)
    return (x @ weight.matrix_NK.T).to(out_dtype or x_TK.dtype)
