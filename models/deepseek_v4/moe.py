"""Mixture of experts of one layer. T tokens, D hidden lanes, E experts, K experts chosen for a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halocline.models.weight_source import join_rows

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Recipe
    from halocline.hal.ops import Ops
    from halocline.hal.ops.moe import Routing
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.weight_source import Scope

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts:
    """Routed experts and the shared expert, which every token uses."""

    def __init__(
        self, config: DeepseekV4Config, recipe: Recipe, is_hash_routed: bool, ops: Ops, weights: Scope
    ) -> None:
        """Takes the tensors of `ffn`."""
        self.ops = ops
        self.num_chosen, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.limit = config.swiglu_limit
        self.shared_limit = config.swiglu_limit if config.clamp_shared_expert else 0.0
        self.gate = ops.gemm.prepare_linear(weights.matrix("gate"), activation="none")
        self.table_VK = weights.tensor("gate.tid2eid") if is_hash_routed else None
        self.bias_E = None if is_hash_routed else weights.tensor("gate.bias")
        num_experts = config.n_routed_experts
        self.experts = ops.moe.prepare_experts(
            weights.experts("experts", ("w1", "w3"), num_experts),
            weights.experts("experts", ("w2",), num_experts),
            activation=recipe.activation,
        )
        shared = weights / "shared_experts"
        self.shared_gate_up = [
            ops.gemm.prepare_linear(weight, activation=recipe.activation)
            for weight in join_rows(shared.matrix("w1"), shared.matrix("w3"))
        ]
        self.shared_down = ops.gemm.prepare_linear(shared.matrix("w2"), activation=recipe.activation)

    def forward(self, x_TD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Sums the chosen experts of each token and the shared one.

        Args:
            x_TD: (tokens, hidden) normed input.
            token_ids_T: (tokens,) ids, for hash-routed layers.

        Returns:
            (tokens, hidden), element type of `x_TD`.
        """
        routed_TD = self.ops.moe.experts(x_TD, self.route(x_TD, token_ids_T), self.experts, limit=self.limit)
        linear = self.ops.gemm.linear
        parts = [linear(x_TD, weight) for weight in self.shared_gate_up]
        gate_up_TI2 = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        shared_TD = linear(self.ops.moe.swiglu(gate_up_TI2, limit=self.shared_limit), self.shared_down)
        return routed_TD + shared_TD  # one rounding: elements are added in float32

    def route(self, x_TD: Tensor, token_ids_T: Tensor) -> Routing:
        """Experts and weights of each token."""
        logits_TE = self.ops.gemm.linear(x_TD, self.gate, out_dtype=torch.float32)
        if self.table_VK is not None:
            return self.ops.moe.route_by_hash(logits_TE, token_ids_T, self.table_VK, scale=self.scale)
        assert self.bias_E is not None
        return self.ops.moe.route_by_score(logits_TE, self.bias_E, num_chosen=self.num_chosen, scale=self.scale)
