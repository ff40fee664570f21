"""Normalised Walsh-Hadamard transform in natural (Sylvester) order."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.errors import ShapeError

__all__ = ["hadamard_transform"]


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiplies the last axis by H / sqrt(width), H[i, j] = (-1) ** popcount(i & j); it is its own inverse.

    Raises:
        ShapeError: If the width is no power of two.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ShapeError(f"a Walsh-Hadamard transform of {width} lanes: the width must be a power of two")
    step = 1
    while step < width:
        pairs = x.unflatten(-1, (width // (2 * step), 2, step))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        step *= 2
    size: float = width**-0.5
    return x * size
