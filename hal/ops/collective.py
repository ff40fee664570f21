"""Contracts of exchanges between the processes of a group. T tokens, D lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ProcessGroup", "all_gather", "all_reduce"]

_SUM = {
    "float32": Tolerance(atol=1e-5, rtol=1e-5, norm=1e-6, reason="sum over ranks in another order"),
    "bfloat16": Tolerance(atol=3e-2, rtol=2e-2, norm=5e-3, reason="bfloat16 partial sums"),
}


class ProcessGroup(Protocol):
    """The ranks that take part; size 1 makes every collective the identity."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This process."""
        ...


@op("collective", tolerances=_SUM)
def all_reduce(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """Sums a tensor over the ranks of a group.

    Args:
        x_TD: Same shape on every rank; zero rows still take part.
        group: Who takes part.

    Returns:
        The sum, on every rank; may share memory with `x_TD`.

    Raises:
        InputError: If the kernel cannot serve a group of that size.
    Numerics: sums in float32 or in the element type, in an order that depends on the group alone.
    """
    raise NotImplementedError


@op("collective", tolerances=_SUM)
def all_gather(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """Joins the last axis over the ranks of a group, in rank order.

    Args:
        x_TD: Same shape on every rank.
        group: Who takes part.

    Returns:
        (..., size * last axis), on every rank.

    Raises:
        InputError: If the kernel cannot serve a group of that size.
    Numerics: nothing is computed.
    """
    raise NotImplementedError
