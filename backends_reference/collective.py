"""Reference exchanges: torch.distributed itself. A group of one process exchanges nothing and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from halocline.hal.op import implements
from halocline.hal.ops.collective import ProcessGroup, all_gather, all_reduce, all_to_all, broadcast
from halocline.hal.process_group import check_counts, check_source

__all__ = ["all_gather_reference", "all_reduce_reference", "all_to_all_reference", "broadcast_reference"]


@implements(all_reduce)
def all_reduce_reference(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """See the contract."""
    if group.size == 1:
        return x_TD
    import torch.distributed as dist

    sum_TD = x_TD.contiguous()
    dist.all_reduce(sum_TD, group=group.handle)
    return sum_TD


@implements(all_gather)
def all_gather_reference(x_TD: Tensor, group: ProcessGroup, *, axis: Literal[0, -1] = -1) -> Tensor:
    """See the contract."""
    if group.size == 1:
        return x_TD
    import torch.distributed as dist

    mine = x_TD.contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(parts, mine, group=group.handle)
    return torch.cat(parts, dim=axis)


@implements(all_to_all)
def all_to_all_reference(
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
def broadcast_reference(x_TD: Tensor, group: ProcessGroup, *, source: int = 0) -> Tensor:
    """See the contract."""
    check_source(source, group.size)
    if group.size == 1:
        return x_TD
    import torch.distributed as dist

    values_TD = x_TD.contiguous()
    dist.broadcast(values_TD, group=group.handle, group_src=source)
    return values_TD
