"""Attention of one layer, of any of the three kinds.

`sliding_attention` (ratio 0) sees its window; `compressed_sparse_attention` (ratio 4) adds the compressed entries that
its indexer picks; `heavily_compressed_attention` (ratio 128) adds all closed blocks.

Shapes: T tokens, D hidden lanes, H query heads, d head width, Q lanes of the query bottleneck.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halocline.models.deepseek_v4.compressor import Compressor, Indexer
from halocline.models.layers.joined_linear import JoinedLinear
from halocline.models.parallel import SINGLE, Parallel

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Recipe
    from halocline.hal.ops import Ops
    from halocline.hal.ops.attention import AttentionPlan, RowSelection
    from halocline.hal.ops.gemm import PreparedWeight
    from halocline.hal.ops.rope import RopeTable
    from halocline.models.deepseek_v4.cache import LayerCache
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.weight_source import Scope

__all__ = ["Attention"]


class Attention:
    """Low-rank query, one latent for key and value, window and compressed rows, grouped output projection.

    Heads and output groups are split over the attention group: `wq_b`, sink, `wo_a` and the lanes of `wo_b`. What
    `wo_b` gives is a partial sum of that group, reduced here: the output is complete. Latents, compressors and indexer
    are replicated.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        recipe: Recipe,
        ratio: int,
        ops: Ops,
        weights: Scope,
        rope: RopeTable,
        parallel: Parallel = SINGLE,
    ) -> None:
        """Takes the tensors of `attn`."""
        self.ops, self.ratio, self.rope, self.group = ops, ratio, rope, parallel.attention
        self.num_heads, self.head_dim = config.num_attention_heads // self.group.size, config.head_dim
        self.num_groups, self.eps = config.o_groups // self.group.size, config.rms_norm_eps
        self.scale = config.head_dim**-0.5

        def linear(name: str) -> PreparedWeight:
            return ops.gemm.prepare_linear(weights.matrix(name), activation=recipe.activation)

        self.wq_a_wkv = JoinedLinear(ops, weights.matrix("wq_a"), weights.matrix("wkv"), activation=recipe.activation)
        self.wq_b, self.wo_b = linear("wq_b"), linear("wo_b")
        self.wo_a = ops.attention.prepare_output(weights.matrix("wo_a"), activation="none")
        self.q_norm_Q, self.kv_norm_d = weights.tensor("q_norm.weight"), weights.tensor("kv_norm.weight")
        self.sink_H = weights.tensor("attn_sink")
        self.compressor = Compressor(config, ops, weights / "compressor", rope) if ratio else None
        self.indexer = Indexer(config, recipe, ops, weights / "indexer", rope) if ratio == 4 else None

    def forward(self, x_TD: Tensor, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """Attends from a step's tokens, after storing their rows and every entry that they complete.

        Args:
            x_TD: (tokens, hidden) normed input.
            plan: Of this step.
            cache: Of this layer; written in place.

        Returns:
            (tokens, hidden), complete: already reduced over the attention group.
        """
        gemm, attention = self.ops.gemm, self.ops.attention
        q_lora_TQ, latent_Td = self.wq_a_wkv.apart(x_TD)
        q_lora_TQ = self.ops.norm.rms_norm(q_lora_TQ, self.q_norm_Q, eps=self.eps)
        q_THd = gemm.linear(q_lora_TQ, self.wq_b).unflatten(-1, (self.num_heads, self.head_dim))
        q_THd = attention.prepare_query(plan, q_THd, self.rope, eps=self.eps)
        self.ops.kv_cache.insert_window(plan, latent_Td, self.kv_norm_d, self.rope, cache.window, eps=self.eps)
        compressed_rows = self._compress(x_TD, q_lora_TQ, plan, cache)
        out_THd = self._attend(q_THd, plan, cache, compressed_rows)
        z_TG = attention.output(plan, out_THd, self.rope, self.wo_a, num_groups=self.num_groups)
        return self.ops.collective.all_reduce(gemm.linear(z_TG, self.wo_b), self.group)

    def _compress(self, x_TD: Tensor, q_lora_TQ: Tensor, plan: AttentionPlan, cache: LayerCache) -> RowSelection | None:
        """Advances the compressors, then says which compressed rows each token sees."""
        if self.compressor is None:
            return None
        assert cache.compressed is not None and cache.state is not None
        self.compressor.insert(x_TD, plan, cache.state, cache.compressed)
        if self.indexer is None:
            return plan.all_rows[self.ratio]
        assert cache.index_keys is not None and cache.index_state is not None
        self.indexer.insert(x_TD, plan, cache.index_state, cache.index_keys)
        return self.indexer.select(x_TD, q_lora_TQ, plan, cache.index_keys, cache.compressed.layout.page_rows)

    def _attend(
        self, q_THd: Tensor, plan: AttentionPlan, cache: LayerCache, compressed_rows: RowSelection | None
    ) -> Tensor:
        """Decode kernel for the tokens that decode, prefill kernel for the rest, as the plan's layout says."""
        attention, num_tokens = self.ops.attention, q_THd.shape[0]
        first_prefill = num_tokens if plan.prefill_layout == "paged" else plan.batch.num_decode_tokens
        if plan.batch.num_tokens <= plan.batch.num_decode_tokens:
            first_prefill = num_tokens
        parts = []
        for kernel, start, stop in (
            (attention.sparse_decode, 0, first_prefill),
            (attention.sparse_prefill, first_prefill, num_tokens),
        ):
            if start < stop:
                rows = None if compressed_rows is None else compressed_rows.rows(start, stop)
                window_rows = plan.window_rows.rows(start, stop)
                result = kernel(
                    plan,
                    q_THd[start:stop],
                    cache.window,
                    window_rows,
                    cache.compressed,
                    rows,
                    self.sink_H,
                    scale=self.scale,
                )
                parts.append(result.out_THD)
        if not parts:
            return torch.empty_like(q_THd)  # no tokens
        return torch.cat(parts) if len(parts) > 1 else parts[0]
