"""Reference normalisations. Shapes as in `halocline.hal.ops.norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.norm import rms_norm

__all__ = ["rms_norm_reference", "root_mean_square_scale"]


def root_mean_square_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x ** 2) + eps) over the last axis, float32, last axis kept."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


@implements(rms_norm)
def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """See the contract."""
    if weight_D.shape != x_TD.shape[-1:]:
        raise ShapeError(f"gain of shape {tuple(weight_D.shape)} for rows of {x_TD.shape[-1]} lanes")
    return (x_TD.float() * root_mean_square_scale(x_TD, eps) * weight_D.float()).to(x_TD.dtype)
