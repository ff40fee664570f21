"""Contracts of normalisations that stand alone. T rows, D lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rms_norm"]


@op(
    "norm",
    tolerances={
        "float32": Tolerance(atol=1e-5, rtol=1e-5, norm=1e-6, reason="float32 sum of squares in another order"),
        "bfloat16": Tolerance(atol=1.6e-2, rtol=1e-2, norm=3e-3, reason="one bfloat16 rounding"),
    },
)
def rms_norm(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Divides each row by its root mean square and multiplies by a gain.

    Args:
        x_TD: (..., lanes) bfloat16 or float32.
        weight_D: (lanes,) gain, bfloat16 or float32.
        eps: Added to the mean square.

    Returns:
        Shape and element type of `x_TD`.

    Raises:
        ShapeError: If the gain has another width.
    Numerics: float32 statistics and product, cast once.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    raise NotImplementedError
