"""Exchanges by torch.distributed, whose library for a device has one name on both vendors.

Nothing here waits for the host: a collective is launched on the current stream and may be captured, except
`all_to_all`, whose counts the host has to know. NVLink multicast is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from halocline.hal.op import implements
from halocline.hal.ops.collective import ProcessGroup, all_gather, all_reduce, all_to_all, broadcast
from halocline.hal.process_group import check_counts, check_source

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as Handle

__all__ = ["all_gather_torch", "all_reduce_torch", "all_to_all_torch", "broadcast_torch"]


@implements(all_reduce)
def all_reduce_torch(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """See the contract."""
    if group.size == 1:
        return x_TD
    import torch.distributed as dist

    sum_TD = x_TD.contiguous()
    dist.all_reduce(sum_TD, group=group.handle)
    return sum_TD


@implements(all_gather)
def all_gather_torch(x_TD: Tensor, group: ProcessGroup, *, axis: Literal[0, -1] = -1) -> Tensor:
    """See the contract."""
    if group.size == 1:
        return x_TD
    rows = x_TD.new_empty((group.size * x_TD.shape[0], *x_TD.shape[1:]))
    _gather_rows(rows, x_TD.contiguous(), group.handle)
    if axis == 0:
        return rows
    lanes: Tensor = rows.unflatten(0, (group.size, x_TD.shape[0])).movedim(0, -2).flatten(-2)
    return lanes


def _gather_rows(rows: Tensor, mine: Tensor, handle: Handle | None) -> None:
    import torch.distributed as dist

    # torch 2.13 renamed all_gather_into_tensor and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, mine, group=handle)


@implements(all_to_all)
def all_to_all_torch(
    x_SD: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: ProcessGroup
) -> Tensor:
    """See the contract."""
    check_counts(x_SD.shape[0], send_counts, receive_counts, group.size)
    if group.size == 1:
        return x_SD
    import torch.distributed as dist

    received = x_SD.new_empty((sum(receive_counts), *x_SD.shape[1:]))
    dist.all_to_all_single(received, x_SD.contiguous(), list(receive_counts), list(send_counts), group=group.handle)
    return received


@implements(broadcast)
def broadcast_torch(x_TD: Tensor, group: ProcessGroup, *, source: int = 0) -> Tensor:
    """See the contract."""
    check_source(source, group.size)
    if group.size == 1:
        return x_TD
    import torch.distributed as dist

    values_TD = x_TD.contiguous()
    dist.broadcast(values_TD, group=group.handle, group_src=source)
    return values_TD
