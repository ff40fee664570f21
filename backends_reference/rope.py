"""Rotation of adjacent lane pairs, shared by the reference kernels. P positions, R rotary lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.ops.rope import RopeTable

__all__ = ["rotate_tail"]


def rotate_tail(x: Tensor, rope: RopeTable, positions_T: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotates the last lanes of each row by its position.

    Args:
        x: (tokens, ..., lanes) float32.
        rope: Table.
        positions_T: (tokens,) positions; negative ones (padding) are read as 0.
        inverse: Rotate back.

    Returns:
        A new tensor of the same shape.

    Raises:
        ShapeError: If the table is wider than a row.
    """
    width = rope.rope_width
    if width > x.shape[-1]:
        raise ShapeError(f"a rotary table of {width} lanes for rows of {x.shape[-1]}")
    table = rope.cos_sin_PR[positions_T.long().clamp_min(0)]
    table = table.view(table.shape[0], *(1,) * (x.dim() - 2), width // 2, 2)
    cos, sin = table[..., 0], -table[..., 1] if inverse else table[..., 1]
    tail = x[..., -width:].unflatten(-1, (width // 2, 2))
    real, imaginary = tail[..., 0], tail[..., 1]
    rotated = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    return torch.cat((x[..., :-width], rotated.flatten(-2)), dim=-1)
