"""One transformer layer between two hyper-connection sites. T tokens, N streams, D hidden lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halocline.models.deepseek_v4.attention import Attention
from halocline.models.deepseek_v4.hyper_connection import HyperConnection
from halocline.models.deepseek_v4.moe import MixtureOfExperts
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

__all__ = ["Block"]


class Block:
    """Attention, then experts; each reads from the streams and writes to them. There is no other residual.

    Streams are complete on every rank; so is what both parts add to them. Sites and norms are replicated.

    Attributes:
        kind: What its launches follow from, beside the shapes that all layers of a model share.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        recipe: Recipe,
        layer: int,
        ops: Ops,
        weights: Scope,
        rope: RopeTable,
        parallel: Parallel = SINGLE,
    ) -> None:
        """Takes the tensors of `layers.<layer>` (or of a draft layer, which counts on behind the main ones)."""
        self.ops, self.eps = ops, config.rms_norm_eps
        self.attention_site = HyperConnection(config, ops, weights, "attn")
        self.ffn_site = HyperConnection(config, ops, weights, "ffn")
        self.attn_norm_D = weights.tensor("attn_norm.weight")
        self.ffn_norm_D = weights.tensor("ffn_norm.weight")
        ratio, is_hash_routed = config.compress_ratios[layer], config.is_hash_routed(layer)
        self.kind = (ratio, is_hash_routed, ops.kernels)
        self.attention = Attention(config, recipe, ratio, ops, weights / "attn", rope, parallel)
        self.moe = MixtureOfExperts(config, recipe, is_hash_routed, ops, weights / "ffn", parallel)

    def forward(self, streams_TND: Tensor, tokens: ExpertTokens, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """The streams after this layer."""
        rms_norm = self.ops.norm.rms_norm
        site = self.attention_site.read(streams_TND)
        y_TD = self.attention.forward(rms_norm(site.x_TD, self.attn_norm_D, eps=self.eps), plan, cache)
        streams_TND = self.attention_site.write(y_TD, streams_TND, site)
        site = self.ffn_site.read(streams_TND)
        y_TD = self.moe.forward(rms_norm(site.x_TD, self.ffn_norm_D, eps=self.eps), tokens)
        return self.ffn_site.write(y_TD, streams_TND, site)
