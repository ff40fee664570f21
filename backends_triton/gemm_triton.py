"""Dense products by the portable kernels, for every weight format. T rows, K lanes in, N lanes out, G groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halocline.backends_triton.block_scales import block_codes, block_scales
from halocline.backends_triton.device_facts import in_dialect_of
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.op import implements
from halocline.hal.ops.gemm import PreparedWeight, linear, prepare_linear
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE
from halocline.kernels_portable.linear_layer import StoredMatrices, multiply, scales_of_groups
from halocline.kernels_portable.target import target_of

__all__ = ["TritonWeight", "linear_triton", "prepare_linear_triton", "prepare_weight", "stored_matrices"]

_PLAIN = (WeightFormat.FLOAT32, WeightFormat.BFLOAT16)


@dataclass(frozen=True, eq=False, kw_only=True)
class TritonWeight:
    """A matrix in the bytes of its checkpoint, but for the FP8 dialect, which is that of the device.

    Attributes:
        format: How `data` is stored.
        shape: Logical (out, in).
        data: Contiguous elements; packed pairs for E2M1.
        scale: float32 for FP8, bytes for E2M1, None for plain ones.
        global_scale: float32 (1,), NVFP4 only.
        rounds_input: Whether inputs are rounded to E4M3 in groups of 128 lanes.
        fp8_dialect: Of E4M3 codes in `data`.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    data: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    rounds_input: bool
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp"


def prepare_weight(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> TritonWeight:
    """See `halocline.hal.ops.gemm.prepare_linear`."""
    if len(weight.shape) != 2:
        raise ShapeError(f"a matrix is needed, found a weight of shape {weight.shape}")
    weight = in_dialect_of(weight, weight.data.device)
    scale, data = None, weight.data
    if weight.format is WeightFormat.FP8_BLOCK:
        scale, data = block_scales(weight), block_codes(weight)
    elif weight.format not in _PLAIN:
        if weight.scale is None:
            raise ShapeError(f"a weight in {weight.format.value} of shape {weight.shape} has no scale")
        scale = weight.scale.contiguous().view(torch.uint8)
    return TritonWeight(
        format=weight.format,
        shape=tuple(weight.shape),
        data=data.contiguous(),
        scale=scale,
        global_scale=None if weight.global_scale is None else weight.global_scale.reshape(1).float(),
        rounds_input=activation == "fp8_group128" and weight.format not in _PLAIN,
        fp8_dialect=weight.fp8_dialect,
    )


@implements(prepare_linear)
def prepare_linear_triton(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract."""
    return prepare_weight(weight, activation=activation)


@implements(linear)
def linear_triton(x_TK: Tensor, weight: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """See the contract."""
    assert isinstance(weight, TritonWeight)
    if x_TK.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"rows of {x_TK.shape[-1]} lanes against a weight of shape {weight.shape}")
    return multiply(
        x_TK,
        stored_matrices(weight, 1),
        rounds_input=weight.rounds_input,
        out_dtype=out_dtype or x_TK.dtype,
        target=target_of(x_TK.device),
        batch_invariant=False,
    )


def stored_matrices(weight: TritonWeight, num_groups: int) -> StoredMatrices:
    """A matrix as the portable kernels take it, one for each of several groups of its rows.

    Raises:
        ShapeError: If a group begins or ends within a block of scales that it does not share whole.
    """
    data_GNK = weight.data.view(num_groups, -1, weight.data.shape[1])
    rows, scale = data_GNK.shape[1], weight.scale
    if weight.format is WeightFormat.FP8_BLOCK:
        assert scale is not None
        if num_groups > 1 and rows % FP8_BLOCK_SIZE and FP8_BLOCK_SIZE % rows:
            raise ShapeError(f"groups of {rows} rows: scales of {FP8_BLOCK_SIZE} rows would straddle them")
        scale = scales_of_groups(scale, num_groups=num_groups, rows=rows)
        return StoredMatrices(format="fp8", data=data_GNK, scale=scale, fp8_dialect=weight.fp8_dialect)
    if weight.format in _PLAIN:
        return StoredMatrices(format="plain", data=data_GNK)
    assert scale is not None
    return StoredMatrices(format="fp4", data=data_GNK, scale=scale[None], global_scale=weight.global_scale)
