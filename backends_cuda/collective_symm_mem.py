"""Small sums over the GPUs of one host through memory that all of them see, beyond that NCCL.

A sum of a few rows takes no time but that of meeting: NCCL's kernel needs twice as long for it as one launch of
`kernels_portable.shared_sum`, which reads what the others have put into memory of torch's symmetric allocator. torch
sums in such memory, too: `one_shot_all_reduce` meets twice and wants its input there, which is one more launch, and
`one_shot_all_reduce_copy`, which copies by itself, tells the others before all threads of a block have copied (seen in
torch 2.7 to 2.13), so that neither is used. NVLink multicast is not used, and must be off: see `hal.settings`.

A group's memory is made at its first eager sum, which all its ranks enter, and is tried out there. Where it cannot be
had, on any of the ranks, all of them sum by NCCL, and one line of the log says why.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from halocline.backends_triton.collective_torch import all_reduce_torch
from halocline.hal.op import implements
from halocline.hal.ops.collective import ProcessGroup, all_reduce
from halocline.kernels_portable.shared_sum import CHUNK_BYTES, MOST_RANKS, POLLS, shared_bytes, shared_sum_

__all__ = ["all_reduce_symm_mem", "most_bytes"]

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20  # from all others together, up to which one reading of everything is faster than a ring
_POLLS_OF_A_TRIAL = 1 << 22  # a few seconds
_TRIALS = 4  # both copies twice
_KINDS = (torch.bfloat16, torch.float32)


def most_bytes(num_ranks: int) -> int:
    """The largest tensor that is summed through shared memory."""
    return _READ_BYTES // (num_ranks - 1) // CHUNK_BYTES * CHUNK_BYTES


@implements(all_reduce)
def all_reduce_symm_mem(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """See the contract. Partial sums are added in float32, in the order of ranks, and rounded once."""
    if group.size == 1:
        return x_TD
    if x_TD.dtype in _KINDS and x_TD.numel() * x_TD.element_size() <= most_bytes(group.size):
        shared = _shared_memory(group, x_TD.device)
        if shared is not None:
            sum_TD = x_TD.contiguous()
            shared.sum_(sum_TD)
            return sum_TD
    return all_reduce_torch(x_TD, group)


@dataclass(frozen=True, eq=False, kw_only=True)
class _SharedMemory:
    """What a rank has in common with the others of its group.

    Attributes:
        memory: Of this rank; the others see it as long as it is held.
        handle: torch's, which holds the others' memory.
        addresses_R: Where each rank's is.
        calls_B: Counts of this rank.
        rank: In the group.
    """

    memory: Tensor
    handle: Any
    addresses_R: Tensor
    calls_B: Tensor
    rank: int

    def sum_(self, x_TD: Tensor, *, most_polls: int = POLLS) -> None:
        """Replaces a contiguous tensor by the sum of all ranks'."""
        capacity = most_bytes(self.addresses_R.shape[0])
        shared_sum_(
            x_TD, self.addresses_R, self.calls_B, rank=self.rank, capacity=capacity, most_polls=most_polls
        )  # fmt: skip


# Of each group that has summed; a group goes with whoever opened it.
_opened: WeakKeyDictionary[ProcessGroup, _SharedMemory | None] = WeakKeyDictionary()


def _shared_memory(group: ProcessGroup, device: torch.device) -> _SharedMemory | None:
    """A group's shared memory, made at the first call; None where there is none. A capture is no place to make it."""
    if group not in _opened:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        _opened[group] = _open(group, device)
    return _opened[group]


def _open(group: ProcessGroup, device: torch.device) -> _SharedMemory | None:
    """Makes and tries it; every rank comes to the same answer."""
    assert group.handle is not None
    own = _Place(_host(), device.index, _refusal(group, device))
    reason = _obstacle(_of_all(own, group), group.rank)
    shared = None
    if not any(_of_all(reason, group)):
        try:
            shared = _share(group, device)
            reason = _fault(shared, group, device)
        except (RuntimeError, ImportError, AttributeError) as error:  # torch's own, which a release may move
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    reasons: list[str] = _of_all(reason, group)
    said = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")
    if not said:
        return shared
    if group.rank == 0:
        logger.warning("%d ranks share no memory, so that small sums go through NCCL: %s", group.size, said)
    return None


class _Place(NamedTuple):
    """What ranks tell each other before anything is made; `refusal` is empty where nothing speaks against it."""

    host: str
    device: int | None
    refusal: str


def _host() -> str:
    """Tells machines, and containers with process numbers of their own, apart: processes pass their memory on."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _refusal(group: ProcessGroup, device: torch.device) -> str:
    """Why this rank alone knows that there is none."""
    import torch.distributed as dist

    if device.type != "cuda":
        return f"its tensors are on {device.type}"
    if group.size > MOST_RANKS:
        return f"{group.size} ranks, of at most {MOST_RANKS}"
    library = dist.get_backend(group.handle)
    return f"its group is one of {library}" if library != "nccl" else ""


def _obstacle(places: Sequence[_Place], rank: int) -> str:
    """What the places of all ranks say against it, seen from one of them; empty if nothing does."""
    own = places[rank]
    if own.refusal:
        return own.refusal
    if any(place.refusal for place in places):
        return ""  # that rank says it
    if any(place.host != own.host for place in places):
        return f"the ranks are on {len({place.host for place in places})} hosts"
    if len({place.device for place in places}) < len(places):
        return "ranks see their devices under the same number"
    others = [place.device for number, place in enumerate(places) if number != rank]
    hidden = [other for other in others if not _sees(own.device, other)]
    return f"device {own.device} does not see the memory of {hidden}" if hidden else ""


def _sees(own: int | None, other: int | None) -> bool:
    """Whether one device reads the memory of another; a process may have been given a part of the devices only."""
    assert own is not None and other is not None, "a tensor on a GPU knows which"
    return other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(own, other)


def _share(group: ProcessGroup, device: torch.device) -> _SharedMemory:
    """Allocates this rank's memory and finds that of the others."""
    import torch.distributed._symmetric_memory as symmetric

    assert group.handle is not None
    capacity = most_bytes(group.size)
    memory = symmetric.empty(shared_bytes(capacity), dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(memory, group.handle.group_name)
    memory.zero_()
    begins = memory.data_ptr() - handle.buffer_ptrs[group.rank]
    addresses = [address + begins for address in handle.buffer_ptrs]
    return _SharedMemory(
        memory=memory,
        handle=handle,
        addresses_R=torch.tensor(addresses, dtype=torch.int64, device=device),
        calls_B=torch.zeros(capacity // CHUNK_BYTES, dtype=torch.int32, device=device),
        rank=group.rank,
    )


def _fault(shared: _SharedMemory, group: ProcessGroup, device: torch.device) -> str:
    """Sums what is known and compares; empty if all was right.

    Compiling takes one rank longer than another, so that the kernel is compiled by a call that waits for nobody; its
    result is none.
    """
    x_S = torch.empty(most_bytes(group.size) // 2, dtype=torch.bfloat16, device=device)
    _of_all(_settled(device), group)  # all flags are zeros
    shared.sum_(x_S, most_polls=0)
    _of_all(_settled(device), group)
    expected = group.size * (group.size + 1) / 2
    for trial in range(_TRIALS):
        x_S.fill_(float(group.rank + 1))
        shared.sum_(x_S, most_polls=_POLLS_OF_A_TRIAL)
        wrong = x_S[x_S != expected]
        if wrong.numel():
            return f"sums are wrong in trial {trial + 1} of {_TRIALS}: {wrong[0].item()} instead of {expected}"
    return ""


def _settled(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return True


def _of_all(value: Any, group: ProcessGroup) -> list[Any]:
    """Every rank's value, in order of rank; all ranks call it."""
    import torch.distributed as dist

    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.handle)
    return values
