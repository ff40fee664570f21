"""The multi-token-prediction layer: guesses the token after next from the main model's streams.

Shapes: T tokens, N streams, D hidden lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halocline.models.deepseek_v4.block import Block
from halocline.models.deepseek_v4.hyper_connection import HyperConnectionHead
from halocline.models.parallel import SINGLE, Parallel

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Recipe
    from halocline.hal.ops import Ops
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.rope import RopeTable
    from halocline.models.deepseek_v4.cache import LayerCache
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.layers.routed_experts import ExpertTokens
    from halocline.models.weight_source import Scope

__all__ = ["MultiTokenPrediction"]


class MultiTokenPrediction:
    """One ordinary layer (ratio 0, score routing) with a window cache of its own, on the main model's streams.

    Only its block is split; the output is complete.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        recipe: Recipe,
        index: int,
        ops: Ops,
        weights: Scope,
        rope: RopeTable,
        parallel: Parallel = SINGLE,
    ) -> None:
        """Takes the tensors of `mtp.<index>`; embedding and head stay the main model's."""
        self.ops, self.eps = ops, config.rms_norm_eps
        self.layer = config.num_hidden_layers + index
        self.block = Block(config, recipe, self.layer, ops, weights, rope, parallel)
        self.e_proj = ops.gemm.prepare_linear(weights.matrix("e_proj"), activation=recipe.activation)
        self.h_proj = ops.gemm.prepare_linear(weights.matrix("h_proj"), activation=recipe.activation)
        self.enorm_D, self.hnorm_D = weights.tensor("enorm.weight"), weights.tensor("hnorm.weight")
        self.norm_D = weights.tensor("norm.weight")
        self.collapse = HyperConnectionHead(config, ops, weights)

    def forward(
        self,
        streams_TND: Tensor,
        next_embedding_TD: Tensor,
        next_tokens: ExpertTokens,
        plan: AttentionPlan,
        cache: LayerCache,
    ) -> Tensor:
        """Normed hidden states whose logits predict the token after next.

        Args:
            streams_TND: The main model's final streams at positions p, before their collapse.
            next_embedding_TD: Main embedding of the ids at p + 1.
            next_tokens: Those ids, from `gather_tokens`.
            plan: Of the step that fed positions p.
            cache: Of this layer.

        Returns:
            (tokens, hidden); the main head turns them into logits for position p + 2.
        """
        rms_norm, linear = self.ops.norm.rms_norm, self.ops.gemm.linear
        embedded_TD = linear(rms_norm(next_embedding_TD, self.enorm_D, eps=self.eps), self.e_proj)
        normed_TND = rms_norm(streams_TND, self.hnorm_D, eps=self.eps)
        projected_TND = linear(normed_TND.flatten(0, 1), self.h_proj).view_as(streams_TND)
        streams_TND = self.block.forward(embedded_TD[:, None] + projected_TND, next_tokens, plan, cache)
        return rms_norm(self.collapse(streams_TND), self.norm_D, eps=self.eps)
