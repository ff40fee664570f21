"""The routed experts of a layer, spread over ranks. Tokens reach them in one of two ways.

- `ReplicatedTokens` (a2a `none`): every rank runs its experts over the tokens of all ranks; results are summed over the
  world. Shapes depend on the padded batch alone, so a captured graph can hold it.
- `SentTokens` (a2a `all_to_all`): each token's row goes to the ranks that hold its experts, and comes back.

Both take rows of this rank and give a complete result for them. Every rank calls them in every step, with zero rows
too. Shapes: T tokens of this rank, A of all ranks, S rows sent, R received, K experts chosen, D hidden lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from halocline.hal.ops.moe import Routing

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops
    from halocline.models.parallel import Parallel

__all__ = ["ReplicatedTokens", "SentTokens", "local_routing"]

# Runs the experts of this rank: rows and routing by local numbers in, their weighted sum out.
RunExperts = Callable[["Tensor", Routing], "Tensor"]
# Chooses experts by global number for rows and their token ids.
Route = Callable[["Tensor", "Tensor"], Routing]
# Gives a share of the shared expert's result for rows.
RunShared = Callable[["Tensor"], "Tensor"]


def local_routing(routing: Routing, first: int, count: int) -> Routing:
    """The routing in numbers of experts `first` to `first + count`; -1 for those of other ranks."""
    local_TK = routing.ids_TK - first
    mine_TK = (local_TK >= 0) & (local_TK < count)
    return Routing(torch.where(mine_TK, local_TK, torch.full_like(local_TK, -1)), routing.weights_TK)


class ReplicatedTokens:
    """Every rank sees all tokens. What its experts give is a partial sum of the world; the result is complete."""

    def __init__(self, ops: Ops, parallel: Parallel, num_experts: int) -> None:
        """`num_experts` counts those of all ranks."""
        self.ops, self.parallel = ops, parallel
        self.count = num_experts // parallel.sizes.ep
        self.first = parallel.ep_index * self.count

    def __call__(
        self, x_TD: Tensor, token_ids_T: Tensor, route: Route, experts: RunExperts, shared: RunShared | None
    ) -> Tensor:
        """Gathers the rows of all data-parallel groups, runs the local experts, sums over the world, keeps its own.

        Args:
            x_TD: Rows of this rank: as many on every rank, by padding.
            token_ids_T: Their ids.
            route: The router.
            experts: The local experts.
            shared: This rank's part of a shared expert that is split over the world, or None.

        Returns:
            (tokens, hidden), complete for the rows of this rank.
        """
        gather, data = self.ops.collective.all_gather, self.parallel.data
        x_AD, token_ids_A = gather(x_TD, data, axis=0), gather(token_ids_T, data, axis=0)
        routing = route(x_AD, token_ids_A)
        if self.parallel.sizes.ep > 1:
            routing = local_routing(routing, self.first, self.count)
        partial_AD = experts(x_AD, routing)
        if shared is not None:
            partial_AD = partial_AD + shared(x_AD)
        y_AD = self.ops.collective.all_reduce(partial_AD, self.parallel.world)
        num_rows = x_TD.shape[0]
        return y_AD if data.size == 1 else y_AD[data.rank * num_rows : (data.rank + 1) * num_rows]


class SentTokens:
    """Each row travels to the ranks that hold its experts, once for each rank, and their partial sums travel back."""

    def __init__(self, ops: Ops, parallel: Parallel, num_experts: int) -> None:
        """`num_experts` counts those of all ranks."""
        self.ops, self.group = ops, parallel.world
        self.count = num_experts // self.group.size

    def __call__(
        self, x_TD: Tensor, token_ids_T: Tensor, route: Route, experts: RunExperts, shared: RunShared | None
    ) -> Tensor:
        """Sends rows, runs the local experts, returns and sums what they give; see `ReplicatedTokens`.

        The host reads how many rows go where, so no graph can hold it.
        """
        assert shared is None, "each rank has requests of its own, so the shared expert is not split"
        routing = route(x_TD, token_ids_T)
        ranks_TK = torch.div(routing.ids_TK, self.count, rounding_mode="floor")
        wants_WT = (ranks_TK == torch.arange(self.group.size, device=x_TD.device)[:, None, None]).any(-1)
        targets_S, tokens_S = wants_WT.nonzero(as_tuple=True)
        send_counts, receive_counts = self._counts(wants_WT.sum(1))
        there_SK = ranks_TK[tokens_S] == targets_S[:, None]
        ids_SK = torch.where(there_SK, routing.ids_TK[tokens_S] % self.count, -1).int()

        def send(rows: Tensor) -> Tensor:
            return self.ops.collective.all_to_all(rows, send_counts, receive_counts, self.group)

        received = Routing(send(ids_SK), send(routing.weights_TK[tokens_S]))
        partial_RD = experts(send(x_TD[tokens_S]), received)
        partial_SD = self.ops.collective.all_to_all(partial_RD, receive_counts, send_counts, self.group)
        sum_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        return sum_TD.index_add_(0, tokens_S, partial_SD.float()).to(x_TD.dtype)

    def _counts(self, rows_W: Tensor) -> tuple[list[int], list[int]]:
        """Rows for and from each rank."""
        one_each = [1] * self.group.size
        received_W = self.ops.collective.all_to_all(rows_W, one_each, one_each, self.group)
        send_counts, receive_counts = torch.stack((rows_W, received_W)).tolist()
        return send_counts, receive_counts
