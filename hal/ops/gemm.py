"""Contracts of dense products with stored weights.

Shapes: T rows, K input lanes, N output lanes. A weight is converted once, at load, by `prepare_linear`; what it
becomes belongs to the kernel that was bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from halocline.hal.formats import Weight

__all__ = ["PreparedWeight", "linear", "prepare_linear"]


class PreparedWeight(Protocol):
    """A weight in the form that the bound kernel takes; opaque to models."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (out, in)."""
        ...


@op("gemm")
def prepare_linear(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """Converts a matrix once, at load, for `linear`.

    Args:
        weight: (out, in) matrix in any `WeightFormat`.
        activation: How `linear` rounds its input: `fp8_group128` rounds groups of 128 lanes of K to E4M3 with a
            power-of-two scale when the weight is FP8 or FP4; plain weights never round their input.

    Returns:
        The converted weight.

    Raises:
        ShapeError: If the scales do not fit the matrix.
    Numerics: the matrix stands for the same values before and after, up to what `linear` tolerates.
    """
    raise NotImplementedError


@op(
    "gemm",
    tolerances={
        "float32": Tolerance(atol=1e-4, rtol=1e-5, norm=1e-5, reason="float32 sums over K in another order"),
        "bfloat16": Tolerance(atol=3e-2, rtol=2e-2, norm=5e-3, reason="bfloat16 result of float32 sums"),
    },
    semantics=("fp8_dialect", "activation"),
    batch_invariant=False,
    prepare=prepare_linear,
)
def linear(x_TK: Tensor, weight: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiplies rows by the transpose of a stored matrix.

    Args:
        x_TK: (tokens, in) bfloat16 or float32. float32 input with a plain weight is multiplied in float32.
        weight: From `prepare_linear` of the same kernel, logical shape (out, in).
        out_dtype: Element type of the result; that of `x_TK` when left out.

    Returns:
        (tokens, out).

    Raises:
        ShapeError: If K differs.
    Numerics: float32 accumulation; the input of FP8 and FP4 weights is rounded as `prepare_linear` was told.
    Source: DeepSeek-V3 report, section 3.3 (1 x 128 by 128 x 128 scaling); V4 uses power-of-two scales.
    """
    raise NotImplementedError
