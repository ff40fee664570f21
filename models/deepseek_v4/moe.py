"""Mixture of experts of one layer. T tokens, D hidden lanes, E experts, K experts chosen for a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halocline.hal.errors import ConfigError, lines
from halocline.models.layers.joined_linear import JoinedLinear
from halocline.models.layers.routed_experts import ReplicatedTokens, SentTokens
from halocline.models.parallel import SINGLE, Parallel

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Recipe
    from halocline.hal.ops import Ops
    from halocline.hal.ops.moe import Routing
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.layers.routed_experts import ExpertTokens
    from halocline.models.weight_source import Scope

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts:
    """Routed experts and the shared expert, which every token uses.

    The router is replicated. The routed experts are spread over the world, by whole experts and by width. The shared
    expert is split over the world where each rank sees the same tokens and every part is whole blocks: its part is then
    added before the routed sum is reduced. Else every rank holds all of it and adds it once, to its own rows, after the
    reduction. The output is complete.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        recipe: Recipe,
        is_hash_routed: bool,
        ops: Ops,
        weights: Scope,
        parallel: Parallel = SINGLE,
    ) -> None:
        """Takes the tensors of `ffn`.

        Raises:
            ConfigError: If the source gives other experts than those of this rank.
        """
        self.ops = ops
        self.num_chosen, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.limit = config.swiglu_limit
        self.shared_limit = config.swiglu_limit if config.clamp_shared_expert else 0.0
        self.gate = ops.gemm.prepare_linear(weights.matrix("gate"), activation="none")
        self.table_VK = weights.tensor("gate.tid2eid") if is_hash_routed else None
        self.bias_E = None if is_hash_routed else weights.tensor("gate.bias")
        num_experts = config.n_routed_experts
        gate_up, down = (weights.experts("experts", names, num_experts) for names in (("w1", "w3"), ("w2",)))
        held, device = (down.shape[0], down.shape[-1]), down.data.device
        _check_part(held, (num_experts, config.moe_intermediate_size), parallel)
        self.experts = ops.moe.prepare_experts(gate_up, down, activation=recipe.activation)
        del gate_up, down
        shared = weights / "shared_experts"
        self.shared_gate_up = JoinedLinear(ops, shared.matrix("w1"), shared.matrix("w3"), activation=recipe.activation)
        shared_down = shared.matrix("w2")
        self.shared_is_split = shared_down.shape[-1] < config.moe_intermediate_size
        self.shared_down = ops.gemm.prepare_linear(shared_down, activation=recipe.activation)
        spread = SentTokens if parallel.a2a == "all_to_all" else ReplicatedTokens
        self.spread = spread(ops, parallel, num_experts, device)

    def forward(self, x_TD: Tensor, tokens: ExpertTokens) -> Tensor:
        """Sums the chosen experts of each token and the shared one.

        Args:
            x_TD: (tokens, hidden) normed input.
            tokens: From `gather_tokens` of this step: ids for hash-routed layers, and which rows are padding.

        Returns:
            (tokens, hidden), element type of `x_TD`, complete: already reduced over the world.
        """
        if self.shared_is_split:
            return self.spread(x_TD, tokens, self.route, self._run_routed, self._run_shared)
        routed_TD = self.spread(x_TD, tokens, self.route, self._run_routed, None)
        return routed_TD + self._run_shared(x_TD)  # one rounding: elements are added in float32

    def _run_routed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """What the experts of this rank give, by their local numbers: a partial sum of the world."""
        return self.ops.moe.experts(x_TD, routing, self.experts, limit=self.limit)

    def _run_shared(self, x_TD: Tensor) -> Tensor:
        """What this rank's part of the shared expert gives: a partial sum of the world if split, else complete."""
        gate_up_TI2 = self.shared_gate_up.joined(x_TD)
        return self.ops.gemm.linear(self.ops.moe.swiglu(gate_up_TI2, limit=self.shared_limit), self.shared_down)

    def route(self, x_TD: Tensor, token_ids_T: Tensor) -> Routing:
        """Experts and weights of each token, by global number."""
        logits_TE = self.ops.gemm.linear(x_TD, self.gate, out_dtype=torch.float32)
        if self.table_VK is not None:
            return self.ops.moe.route_by_hash(logits_TE, token_ids_T, self.table_VK, scale=self.scale)
        assert self.bias_E is not None
        return self.ops.moe.route_by_score(logits_TE, self.bias_E, num_chosen=self.num_chosen, scale=self.scale)


def _check_part(held: tuple[int, int], whole: tuple[int, int], parallel: Parallel) -> None:
    """Compares the experts and the width that a source gave with the part of this rank."""
    part = (whole[0] // parallel.sizes.ep, whole[1] // parallel.sizes.moe_tp)
    if held != part:
        raise ConfigError(
            lines(
                "the source of the weights is not made for this rank",
                asked=f"{part[0]} experts of width {part[1]} ({parallel.sizes})",
                found=f"{held[0]} experts of width {held[1]}",
                try_="give the source and the network one and the same `parallel`",
            )
        )
