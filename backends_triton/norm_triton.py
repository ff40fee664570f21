"""Norms by the portable kernel."""

from __future__ import annotations

from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.norm import rms_norm
from halocline.kernels_portable import rms_norm as portable

__all__ = ["check_gain", "rms_norm_triton"]


def check_gain(x_TD: Tensor, weight_D: Tensor) -> None:
    """Checks that the gain has the width of the rows.

    Raises:
        ShapeError: If it has not.
    """
    if weight_D.shape != x_TD.shape[-1:]:
        raise ShapeError(f"gain of shape {tuple(weight_D.shape)} for rows of {x_TD.shape[-1]} lanes")


@implements(rms_norm)
def rms_norm_triton(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """See the contract."""
    check_gain(x_TD, weight_D)
    return portable.rms_norm(x_TD, weight_D, eps=eps)
