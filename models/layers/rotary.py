"""Rotary tables. P positions, i pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halocline.hal.ops.rope import RopeTable

__all__ = ["inverse_frequencies", "rotary_table"]


def inverse_frequencies(
    theta: float,
    width: int,
    *,
    factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_positions: int = 0,
) -> Tensor:
    """Inverse frequency of each lane pair, with YaRN's ramp when `factor` exceeds 1 and no magnitude factor.

    Args:
        theta: Base.
        width: Rotary lanes.
        factor: Stretch of the slow pairs; 1 switches YaRN off.
        beta_fast: Rotations within the original length above which a pair is left alone.
        beta_slow: Rotations below which a pair is stretched in full.
        original_positions: Length that the base was trained for.

    Returns:
        (width / 2,) float32.

    Source: Peng et al., YaRN, 2023, section 3.2.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / theta**exponents
    if factor == 1.0:
        return frequencies

    def pair_with_rotations(rotations: float) -> float:
        return width * math.log(original_positions / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_rotations(beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(beta_slow)), width - 1)
    span = high - low if high > low else 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / factor * ramp


def rotary_table(frequencies: Tensor, num_positions: int, *, device: str) -> RopeTable:
    """Cosines and sines of the float32 angles position * frequency, interleaved by pair."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
    return RopeTable(cos_sin_PR=cos_sin.to(device))
