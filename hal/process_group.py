"""Groups of processes that exchange tensors, from torch.distributed.

A group of one process needs no library: torch is imported when a group of several is opened. The launcher has
started torch.distributed before that; which library then moves the bytes follows from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from halocline.hal.errors import InputError, MachineError, ShapeError, lines

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as Handle

    from halocline.hal.ops.collective import ProcessGroup

__all__ = ["ALONE", "TorchGroup", "check_counts", "check_source", "connect", "open_group"]


@dataclass(frozen=True, eq=False)
class TorchGroup:
    """The ranks that take part in an exchange; see `hal.ops.collective.ProcessGroup`.

    Attributes:
        size: Number of ranks.
        rank: This process among them, from 0.
        handle: What torch.distributed knows the group by; `None` for one process.
    """

    size: int = 1
    rank: int = 0
    handle: Handle | None = None


ALONE = TorchGroup()


def check_counts(num_rows: int, send_counts: Sequence[int], receive_counts: Sequence[int], size: int) -> None:
    """Checks the counts of an `all_to_all`.

    Raises:
        ShapeError: If they are not one for each rank, or do not add up to the rows.
    """
    if not len(send_counts) == len(receive_counts) == size or sum(send_counts) != num_rows:
        raise ShapeError(
            lines(
                f"{num_rows} rows cannot be sent to {size} ranks as counted",
                found=f"sent {list(send_counts)}, received {list(receive_counts)}",
                try_="one count for each rank; those sent add up to the rows",
            )
        )


def check_source(source: int, size: int) -> None:
    """Checks the source of a `broadcast`.

    Raises:
        InputError: If the group has no such rank.
    """
    if not 0 <= source < size:
        raise InputError(
            lines(f"rank {source} cannot be the source", found=f"a group of {size}", try_=f"0 to {size - 1}")
        )


def open_group(
    partition: Sequence[Sequence[int]], *, rank: int, device: str, timeout: timedelta | None = None
) -> TorchGroup:
    """Opens every group of a partition of the processes, and gives the one that this process is in.

    All processes call it with the same partition, in the same order among their calls. Nothing is exchanged; some
    libraries connect at a group's first collective, which therefore must not be inside a graph capture.

    Args:
        partition: Ranks of each group; every process is in one of them.
        rank: This process.
        device: Where the tensors are, in torch's words; decides the library.
        timeout: After which a collective that others never enter fails; torch's own when left out.

    Returns:
        The group of `rank`.

    Raises:
        MachineError: If torch.distributed was not started, or with another number of processes.
    """
    mine = next(tuple(ranks) for ranks in partition if rank in ranks)
    if all(len(ranks) == 1 for ranks in partition):
        return ALONE
    import torch
    import torch.distributed as dist

    world = sum(len(ranks) for ranks in partition)
    found = dist.get_world_size() if dist.is_initialized() else 0
    if found != world:
        raise MachineError(
            lines(
                f"{world} processes are to exchange tensors",
                found=f"a world of {found}" if found else "torch.distributed was not started",
                try_="start this many processes, by the command's own sizes or by torchrun",
            )
        )
    backend = dist.get_default_backend_for_device(torch.device(device))
    new_group = cast("Callable[..., object]", dist.new_group)  # pyright: ignore[reportUnknownMemberType]
    handles = [new_group(list(ranks), timeout=timeout, backend=backend) for ranks in partition]
    handle = next(handle for handle, ranks in zip(handles, partition, strict=True) if rank in ranks)
    assert isinstance(handle, dist.ProcessGroup)
    return TorchGroup(len(mine), mine.index(rank), handle)


def connect(groups: Iterable[ProcessGroup], device: str) -> None:
    """Sends one number through each group: what cannot work shows before weights are read, and not in a capture.

    All ranks of a group call it.

    Args:
        groups: Of this process; the same one may come twice.
        device: Where the tensors are, in torch's words.

    Raises:
        MachineError: If a number comes back wrong.
    """
    several = {id(group.handle): group for group in groups if group.handle is not None}
    if not several:
        return
    import torch
    import torch.distributed as dist

    all_reduce = cast("Callable[..., object]", dist.all_reduce)  # pyright: ignore[reportUnknownMemberType]
    for group in several.values():
        one = torch.ones(1, device=device)
        all_reduce(one, group=group.handle)
        if one.item() != group.size:
            raise MachineError(
                lines(
                    f"{group.size} ranks cannot exchange numbers",
                    found=f"a sum of {one.item()} where each has sent 1",
                    try_="NCCL_DEBUG=INFO, which says how the ranks are connected",
                )
            )
