"""Whole weights in and out of their stored formats: quantise, dequantise, change the FP8 dialect.

A `Weight` says how its bytes are meant; nothing here guesses. Stacks of matrices (experts) go through the same
functions as one matrix: the last two axes are out and in.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from halocline.hal.codecs import (
    E2M1_MAX,
    E4M3_MAX,
    FP8_AMAX_FLOOR,
    MXFP4_GROUP,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    fp8_scale,
    pack_e2m1,
    quantize_fp4_groups,
    split_lanes,
)
from halocline.hal.errors import ShapeError, lines
from halocline.hal.formats import Weight, WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["FP8_BLOCK_SIZE", "NVFP4_GROUP", "dequantize", "quantize_weight", "round_trip_weight", "to_fnuz"]

# O output rows, K lanes; B and C count blocks of rows and of lanes, b and c are inside a block; G groups of lanes.
FP8_BLOCK_SIZE = 128
NVFP4_GROUP = 16


def quantize_weight(
    weight_OK: Tensor, weight_format: WeightFormat, *, scale_fmt: Literal["ue8m0", "float32"] = "ue8m0"
) -> Weight:
    """Quantises a matrix, or a stack of them, for storage.

    Args:
        weight_OK: `(..., out, in)` of any float type.
        weight_format: Target format.
        scale_fmt: For FP8_BLOCK: power-of-two scales, rounded up, or plain float32 ones.

    Returns:
        The weight in the layout of `hal.formats.Weight`.

    Raises:
        ShapeError: If K does not fit the format's groups, or a value is not finite.
    """
    import torch

    weight = weight_OK.detach().float()
    shape = tuple(weight.shape)
    if not bool(torch.isfinite(weight).all()):
        raise ShapeError(lines(f"cannot quantise a weight of shape {shape}", found="values that are not finite"))
    if weight_format is WeightFormat.FLOAT32:
        return Weight(data=weight.contiguous(), format=weight_format, shape=shape)
    if weight_format is WeightFormat.BFLOAT16:
        return Weight(data=weight.to(torch.bfloat16).contiguous(), format=weight_format, shape=shape)
    if weight_format is WeightFormat.FP8_BLOCK:
        return _quantize_fp8_block(weight, scale_fmt)
    group = MXFP4_GROUP if weight_format is WeightFormat.MXFP4 else NVFP4_GROUP
    if shape[-1] % group:
        raise ShapeError(f"{weight_format.value} needs K to be a multiple of {group}, found a weight of shape {shape}")
    if weight_format is WeightFormat.MXFP4:
        packed, scale_OG = quantize_fp4_groups(weight)
        return Weight(data=packed, format=weight_format, shape=shape, scale=scale_OG)
    return _quantize_nvfp4(weight)


def _quantize_fp8_block(weight_OK: Tensor, scale_fmt: str) -> Weight:
    import torch

    out, lanes = weight_OK.shape[-2:]
    padded = torch.nn.functional.pad(weight_OK, (0, -lanes % FP8_BLOCK_SIZE, 0, -out % FP8_BLOCK_SIZE))
    blocks_BbCc = _blocks(padded)
    amax_BC = blocks_BbCc.abs().amax(dim=(-3, -1)).clamp(min=FP8_AMAX_FLOOR)
    stored_BC = fp8_scale(amax_BC) if scale_fmt == "ue8m0" else amax_BC / E4M3_MAX
    scale_BC = decode_ue8m0(stored_BC) if scale_fmt == "ue8m0" else stored_BC
    codes_BbCc = encode_e4m3(blocks_BbCc / scale_BC.unsqueeze(-2).unsqueeze(-1))
    codes_OK = codes_BbCc.flatten(-4, -3).flatten(-2)[..., :out, :lanes].contiguous()
    return Weight(data=codes_OK, format=WeightFormat.FP8_BLOCK, shape=tuple(weight_OK.shape), scale=stored_BC)


def _blocks(matrix_OK: Tensor) -> Tensor:
    """Views the last two axes, multiples of the block size, as `(..., B, b, C, c)`."""
    *stack, out, lanes = matrix_OK.shape
    size = FP8_BLOCK_SIZE
    return matrix_OK.reshape(*stack, out // size, size, lanes // size, size)


def _quantize_nvfp4(weight_OK: Tensor) -> Weight:
    import torch

    groups_OGk = split_lanes(weight_OK, NVFP4_GROUP)
    amax_OG = groups_OGk.abs().amax(dim=-1)
    global_scale = amax_OG.amax(dim=(-2, -1)).clamp(min=torch.finfo(torch.float32).tiny * 2**20)
    global_scale = global_scale / (E2M1_MAX * E4M3_MAX)
    scale_OG = encode_e4m3(amax_OG / E2M1_MAX / global_scale[..., None, None])
    step_OG = decode_e4m3(scale_OG) * global_scale[..., None, None]
    scaled = torch.where(step_OG.unsqueeze(-1) > 0, groups_OGk / step_OG.unsqueeze(-1), 0.0)
    return Weight(
        data=pack_e2m1(encode_e2m1(scaled.flatten(-2))),
        format=WeightFormat.NVFP4,
        shape=tuple(weight_OK.shape),
        scale=scale_OG,
        global_scale=global_scale,
    )


def dequantize(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """Computes the matrix that a weight stands for.

    Args:
        weight: Any format.
        dtype: Result type; float32 if not given. E2M1 with power-of-two scales is exact in bfloat16 too.

    Returns:
        A tensor of the weight's logical shape.

    Raises:
        ShapeError: If data or scales do not have the sizes that format and shape imply.
    """
    import torch

    dtype = dtype or torch.float32
    if weight.format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16):
        _expect(weight, "data", weight.data, weight.shape)
        return weight.data.to(dtype)
    if weight.format is WeightFormat.FP8_BLOCK:
        return _dequantize_fp8_block(weight).to(dtype)
    group = MXFP4_GROUP if weight.format is WeightFormat.MXFP4 else NVFP4_GROUP
    *stack, out, lanes = weight.shape
    _expect(weight, "data", weight.data, (*stack, out, lanes // 2))
    scale_OG = _scale_values(weight, (*stack, out, lanes // group))
    values_OK = (split_lanes(decode_e2m1(weight.data), group) * scale_OG.unsqueeze(-1)).flatten(-2)
    if weight.format is WeightFormat.NVFP4:
        values_OK = values_OK * _global_scale_by_row(weight)
    return values_OK.to(dtype)


def _global_scale_by_row(weight: Weight) -> Tensor:
    """Spreads the scale of each matrix, or of each of its equal parts joined by rows, over the rows it covers."""
    *stack, out, _ = weight.shape
    if weight.global_scale is None:
        raise ShapeError(f"a weight in {weight.format.value} of shape {weight.shape} has no global scale")
    parts = weight.global_scale.numel() // max(math.prod(stack), 1)
    if weight.global_scale.numel() != math.prod(stack) * parts or out % parts:
        raise ShapeError(
            f"global scales of shape {tuple(weight.global_scale.shape)} do not fit a weight of shape {weight.shape}"
        )
    by_part: Tensor = weight.global_scale.reshape(*stack, parts)
    return by_part.repeat_interleave(out // parts, dim=-1).unsqueeze(-1)


def _dequantize_fp8_block(weight: Weight) -> Tensor:
    *stack, out, lanes = weight.shape
    size = FP8_BLOCK_SIZE
    _expect(weight, "data", weight.data, weight.shape)
    scale_BC = _scale_values(weight, (*stack, -(-out // size), -(-lanes // size)))
    values_OK = decode_e4m3(weight.data, dialect=weight.fp8_dialect)
    if out % size == 0 and lanes % size == 0:
        scaled_BbCc = _blocks(values_OK).mul_(scale_BC.unsqueeze(-2).unsqueeze(-1))
        return scaled_BbCc.view(values_OK.shape)
    rows_OC = scale_BC.repeat_interleave(size, dim=-2)[..., :out, :]
    for start in range(0, lanes, size):
        values_OK[..., start : start + size].mul_(rows_OC[..., start // size].unsqueeze(-1))
    return values_OK


def _scale_values(weight: Weight, shape: tuple[int, ...]) -> Tensor:
    """Reads the block scales as float32: UE8M0 bytes, E4M3 (NVFP4) or plain."""
    import torch

    if weight.scale is None:
        raise ShapeError(f"a weight in {weight.format.value} of shape {weight.shape} has no scale")
    _expect(weight, "scale", weight.scale, shape)
    if weight.format is WeightFormat.NVFP4:
        return decode_e4m3(weight.scale)
    if weight.scale.dtype == torch.float32:
        return weight.scale
    if weight.scale.element_size() != 1:
        raise ShapeError(f"scales of a {weight.format.value} weight are {weight.scale.dtype}, not bytes or float32")
    return decode_ue8m0(weight.scale)


def _expect(weight: Weight, part: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            f"{part} of a {weight.format.value} weight of shape {weight.shape} has shape {tuple(tensor.shape)}, "
            f"expected {shape}"
        )


def round_trip_weight(weight_OK: Tensor, weight_format: WeightFormat) -> Tensor:
    """Quantises and dequantises a float weight in its own type; gradients pass straight through."""
    import torch

    rounded = dequantize(quantize_weight(weight_OK, weight_format), weight_OK.dtype)
    if torch.is_grad_enabled() and weight_OK.requires_grad:
        return rounded + (weight_OK - weight_OK.detach())
    return rounded


def to_fnuz(weight: Weight) -> Weight:
    """Rewrites OCP E4M3 bytes for hardware that reads E4M3 fnuz, without changing a value.

    The same byte means half as much in fnuz, so scales double; byte 0x80 is -0 in OCP and NaN in fnuz, so it
    becomes 0.

    Raises:
        ShapeError: If the weight holds NaN codes, which fnuz would read as numbers, or a scale cannot double.
    """
    import torch

    if weight.format is not WeightFormat.FP8_BLOCK or weight.fp8_dialect == "fnuz":
        return weight
    byte = weight.data.contiguous().view(torch.uint8)
    if bool(((byte & 0x7F) == 0x7F).any()):
        raise ShapeError(f"a weight of shape {weight.shape} holds NaN codes: it cannot become fnuz")
    assert weight.scale is not None
    scale = weight.scale
    if scale.dtype == torch.float32:
        scale = scale * 2
        if not bool(torch.isfinite(scale).all()):
            raise ShapeError(f"a weight of shape {weight.shape} has a scale that is not finite or cannot double")
    else:
        scale = scale.contiguous().view(torch.uint8)
        if bool((scale >= 254).any()):
            raise ShapeError(f"a weight of shape {weight.shape} has a scale of 2^127 or NaN: it cannot double")
        scale = scale + 1
    data = torch.where(byte == 0x80, 0, byte).to(torch.uint8).view(torch.float8_e4m3fnuz)
    return dataclasses.replace(weight, data=data, scale=scale, fp8_dialect="fnuz")
