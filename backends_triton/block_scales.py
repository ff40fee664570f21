"""Scales of FP8 weights as kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.codecs import decode_ue8m0
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE

__all__ = ["block_codes", "block_scales"]


def block_codes(weight: Weight) -> Tensor:
    """Contiguous E4M3 codes of an FP8 weight, in the element type of its dialect."""
    kind = torch.float8_e4m3fnuz if weight.fp8_dialect == "fnuz" else torch.float8_e4m3fn
    return weight.data.contiguous().view(kind)


def block_scales(weight: Weight) -> Tensor:
    """Contiguous float32 scales (..., ceil(out / 128), ceil(in / 128)) of an FP8 weight.

    Raises:
        ShapeError: If there are none or they have another shape.
    """
    *stack, out, lanes = weight.shape
    expected = (*stack, -(-out // FP8_BLOCK_SIZE), -(-lanes // FP8_BLOCK_SIZE))
    if weight.scale is None or tuple(weight.scale.shape) != expected:
        found = None if weight.scale is None else tuple(weight.scale.shape)
        raise ShapeError(f"an FP8 weight of shape {weight.shape} has scales of shape {found}, expected {expected}")
    return (weight.scale if weight.scale.dtype == torch.float32 else decode_ue8m0(weight.scale)).contiguous()
