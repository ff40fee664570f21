"""What ranks exchange around sampling: logits to the one rank that samples, its tokens to all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from halocline.models.parallel import Parallel

__all__ = ["CollectiveOps", "LogitExchange"]


class CollectiveOps(Protocol):
    """The part of `halocline.hal.ops.Ops` that is called here."""

    @property
    def collective(self) -> Any:
        """The bound kernels of the family: `all_gather` and `broadcast`."""
        ...


class LogitExchange:
    """The collectives of one rank that are not the model's. Every rank enters them in the same order.

    Shapes: R rows of each attention group, padding included, G groups, V vocabulary.
    """

    def __init__(self, ops: CollectiveOps, parallel: Parallel, device: torch.device) -> None:
        self._ops = ops
        self._parallel = parallel
        self._device = device

    def gather(self, logits_RV: Tensor) -> tuple[Tensor, ...]:
        """The logits of each attention group."""
        groups = self._parallel.sizes.dp
        if groups == 1:
            return (logits_RV,)
        joined_SV: Tensor = self._ops.collective.all_gather(logits_RV.contiguous(), self._parallel.data, axis=0)
        return tuple(joined_SV.view(groups, *logits_RV.shape).unbind(0))

    def send_ids(self, ids: Sequence[Tensor], num_rows: int) -> None:
        """Sends the tokens of each group, from the rank that sampled."""
        sent = torch.zeros(self._parallel.sizes.dp, num_rows, dtype=torch.int32, device=self._device)
        for row, group_ids in zip(sent, ids, strict=True):
            row[: len(group_ids)].copy_(group_ids)
        self._ops.collective.broadcast(sent, self._parallel.world)

    def receive_ids(self, num_rows: int) -> Tensor:
        """The tokens of this rank's group, padding included."""
        received = torch.zeros(self._parallel.sizes.dp, num_rows, dtype=torch.int32, device=self._device)
        received_GR: Tensor = self._ops.collective.broadcast(received, self._parallel.world)
        return received_GR[self._parallel.dp_index]
