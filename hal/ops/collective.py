"""Contracts of exchanges between the processes of a group.

Every rank of the group calls the same ops in the same order, also when it has nothing to add: zero rows take part.
Shapes: T rows, S rows sent, R rows received, D lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup as Handle

__all__ = ["ProcessGroup", "all_gather", "all_reduce", "all_to_all", "broadcast"]

_SUM = {
    "float32": Tolerance(atol=1e-5, rtol=1e-5, norm=1e-6, reason="sum over ranks in another order"),
    "bfloat16": Tolerance(atol=3e-2, rtol=2e-2, norm=5e-3, reason="bfloat16 partial sums"),
}


class ProcessGroup(Protocol):
    """The ranks that take part; size 1 makes every collective the identity. See `hal.process_group.TorchGroup`."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This process among them, from 0."""
        ...

    @property
    def handle(self) -> Handle | None:
        """What torch.distributed knows the group by; `None` for a group of one."""
        ...


@op("collective", tolerances=_SUM)
def all_reduce(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """Sums a tensor over the ranks of a group.

    Args:
        x_TD: Partial sum of this rank: same shape and element type on every rank. Its memory may be overwritten.
        group: Who takes part.

    Returns:
        The sum, the same bits on every rank; may share memory with `x_TD`.

    Raises:
        InputError: If the kernel cannot serve a group of that size.
    Numerics: partial sums are rounded to the element type, as torch's libraries do, in an order that depends on the
        group and the shape alone: bfloat16 over n ranks has up to n - 1 roundings.
    """
    raise NotImplementedError


@op("collective", tolerances=_SUM)
def all_gather(x_TD: Tensor, group: ProcessGroup, *, axis: Literal[0, -1] = -1) -> Tensor:
    """Joins an axis over the ranks of a group, in rank order.

    Args:
        x_TD: Same shape and element type on every rank.
        group: Who takes part.
        axis: Which axis grows: the first (rows of every rank) or the last (lanes of every rank).

    Returns:
        `x_TD` with that axis `size` times as long, on every rank.

    Raises:
        InputError: If the kernel cannot serve a group of that size.
    Numerics: nothing is computed.
    """
    raise NotImplementedError


@op("collective", graph_safe=False)
def all_to_all(x_SD: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: ProcessGroup) -> Tensor:
    """Sends some rows to each rank of a group and receives some from each.

    Args:
        x_SD: Rows to send, those for rank 0 first.
        send_counts: Rows for each rank; they add up to the rows of `x_SD`.
        receive_counts: Rows from each rank: what that rank has in `send_counts` for this one.
        group: Who takes part.

    Returns:
        (sum of `receive_counts`, lanes): the rows received, those from rank 0 first.

    Raises:
        ShapeError: If the counts are not one for each rank, or do not add up to the rows.
    Numerics: nothing is computed. Counts are known on the host, so a captured graph cannot hold it.
    """
    raise NotImplementedError


@op("collective")
def broadcast(x_TD: Tensor, group: ProcessGroup, *, source: int = 0) -> Tensor:
    """Gives every rank of a group the tensor of one of them.

    Args:
        x_TD: Same shape and element type on every rank; only the source's values count. Memory may be overwritten.
        group: Who takes part.
        source: Rank in the group whose values are given.

    Returns:
        The source's values; may share memory with `x_TD`.

    Raises:
        InputError: If there is no such rank.
    Numerics: nothing is computed.
    """
    raise NotImplementedError
