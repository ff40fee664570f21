"""The routed experts of a layer, spread over ranks. Tokens reach them in one of two ways.

- `ReplicatedTokens` (a2a `none`): every rank runs its experts over the tokens of all ranks; results are summed over the
  world. Shapes depend on the padded batch alone, so a captured graph can hold it.
- `SentTokens` (a2a `all_to_all`): each token's row goes to the ranks that hold its experts, and comes back.

Both take rows of this rank and give a complete result for them. Every rank calls them in every step, with zero rows
too. Shapes: T tokens of this rank, A of all ranks, S rows sent, R received, K experts chosen, D hidden lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halocline.hal.ops.moe import Routing
from halocline.models.sharding import expert_run

if TYPE_CHECKING:
    from halocline.hal.ops import Ops
    from halocline.models.parallel import Parallel

__all__ = ["ExpertTokens", "ReplicatedTokens", "SentTokens", "gather_tokens"]


class ExpertTokens(NamedTuple):
    """What routing and experts of all layers of a step know of its tokens: those of this rank, or all where gathered.

    Attributes:
        ids_A: Token ids; 0 on rows of padding where there are offsets.
        offsets_A1: Added to expert numbers: 0, and the number of all experts on rows of padding, so that nobody holds
            the expert that such a row has chosen. `None` adds nothing.
    """

    ids_A: Tensor
    offsets_A1: Tensor | None = None


# Runs the experts of this rank: rows and routing by local numbers in, their weighted sum out.
RunExperts = Callable[[Tensor, Routing], Tensor]
# Chooses experts by global number for rows and their token ids.
Route = Callable[[Tensor, Tensor], Routing]
# Gives a share of the shared expert's result for rows.
RunShared = Callable[[Tensor], Tensor]


def gather_tokens(
    ops: Ops, parallel: Parallel, num_experts: int, token_ids_T: Tensor, positions_T: Tensor
) -> ExpertTokens:
    """The tokens that the experts of this rank see, once for all layers of a step.

    Data-parallel groups pad to the fullest of them, so padding is common there and would cost the weights of the
    experts that it chooses: it chooses none.

    Args:
        ops: Bound kernels.
        parallel: This rank's place.
        num_experts: Those of all ranks.
        token_ids_T: Ids of this rank's rows.
        positions_T: Their positions; -1 marks padding.
    """
    if parallel.data.size == 1:
        return ExpertTokens(token_ids_T)
    marked_A = torch.where(positions_T >= 0, token_ids_T, -1)
    if parallel.a2a == "none":
        marked_A = ops.collective.all_gather(marked_A, parallel.data, axis=0)
    return ExpertTokens(marked_A.clamp(min=0), (marked_A < 0).unsqueeze(-1).int() * num_experts)


class ReplicatedTokens:
    """Every rank sees all tokens. What its experts give is a partial sum of the world; the result is complete."""

    def __init__(self, ops: Ops, parallel: Parallel, num_experts: int, device: torch.device) -> None:
        """`num_experts` counts those of all ranks."""
        self.ops, self.parallel = ops, parallel
        held = expert_run(num_experts, parallel)
        # By number of an expert (with the offset of padding): its number among those held here, or -1.
        numbers = [number - held.start if number in held else -1 for number in range(2 * num_experts)]
        self.numbers_2E = torch.tensor(numbers, dtype=torch.int32, device=device)

    def __call__(
        self, x_TD: Tensor, tokens: ExpertTokens, route: Route, experts: RunExperts, shared: RunShared | None
    ) -> Tensor:
        """Gathers the rows of all data-parallel groups, runs the local experts, sums over the world, keeps its own.

        Args:
            x_TD: Rows of this rank: as many on every rank, by padding.
            tokens: From `gather_tokens` of this step.
            route: The router.
            experts: The local experts.
            shared: This rank's part of a shared expert that is split over the world, or None.

        Returns:
            (tokens, hidden), complete for the rows of this rank.
        """
        data = self.parallel.data
        x_AD = self.ops.collective.all_gather(x_TD, data, axis=0)
        partial_AD = experts(x_AD, self._local(route(x_AD, tokens.ids_A), tokens.offsets_A1))
        if shared is not None:
            partial_AD = partial_AD + shared(x_AD)
        y_AD = self.ops.collective.all_reduce(partial_AD, self.parallel.world)
        num_rows = x_TD.shape[0]
        return y_AD if data.size == 1 else y_AD[data.rank * num_rows : (data.rank + 1) * num_rows]

    def _local(self, routing: Routing, offsets_A1: Tensor | None) -> Routing:
        """The routing in numbers of the experts held here; -1 for those of other ranks and for padding."""
        if offsets_A1 is None and self.parallel.sizes.ep == 1:
            return routing
        ids_AK = routing.ids_TK if offsets_A1 is None else routing.ids_TK + offsets_A1
        flat = ids_AK.flatten().clamp(0, self.numbers_2E.shape[0] - 1)  # a router may choose anything for NaN rows
        return Routing(self.numbers_2E.index_select(0, flat).view_as(ids_AK), routing.weights_TK)


class SentTokens:
    """Each row travels to the ranks that hold its experts, once for each rank, and their partial sums travel back."""

    def __init__(self, ops: Ops, parallel: Parallel, num_experts: int, device: torch.device) -> None:
        """`num_experts` counts those of all ranks."""
        self.ops, self.group = ops, parallel.world
        self.count = num_experts // self.group.size
        self.ranks_W11 = torch.arange(self.group.size, device=device)[:, None, None]

    def __call__(
        self, x_TD: Tensor, tokens: ExpertTokens, route: Route, experts: RunExperts, shared: RunShared | None
    ) -> Tensor:
        """Sends rows, runs the local experts, returns and sums what they give; see `ReplicatedTokens`.

        The host reads how many rows go where, so no graph can hold it. Padding is sent nowhere.
        """
        assert shared is None, "each rank has requests of its own, so the shared expert is not split"
        routing = route(x_TD, tokens.ids_A)
        ids_TK = routing.ids_TK if tokens.offsets_A1 is None else routing.ids_TK + tokens.offsets_A1
        ranks_TK = torch.div(ids_TK, self.count, rounding_mode="floor")
        wants_WT = (ranks_TK == self.ranks_W11).any(-1)
        targets_S, tokens_S = wants_WT.nonzero(as_tuple=True)
        send_counts, receive_counts = self._counts(wants_WT.sum(1))
        there_SK = ranks_TK[tokens_S] == targets_S[:, None]
        ids_SK = torch.where(there_SK, ids_TK[tokens_S] % self.count, -1).int()

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
