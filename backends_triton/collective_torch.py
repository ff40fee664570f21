"""Exchanges between processes. Groups of one process run today, for which every exchange is the identity."""

from __future__ import annotations

from torch import Tensor

from halocline.hal.errors import InputError
from halocline.hal.op import implements
from halocline.hal.ops.collective import ProcessGroup, all_gather, all_reduce

__all__ = ["all_gather_torch", "all_reduce_torch"]


def _require_one(group: ProcessGroup) -> None:
    if group.size != 1:
        raise InputError(f"a group of {group.size} ranks was asked for; only groups of one process run today")


@implements(all_reduce)
def all_reduce_torch(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """See the contract."""
    _require_one(group)
    return x_TD


@implements(all_gather)
def all_gather_torch(x_TD: Tensor, group: ProcessGroup) -> Tensor:
    """See the contract."""
    _require_one(group)
    return x_TD
