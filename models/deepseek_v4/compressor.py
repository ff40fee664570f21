"""The compressor of a layer and the indexer of a ratio-4 layer.

Shapes: T tokens, D hidden lanes, C projected lanes, H index heads, I index width, K entries kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops.attention import RowSelection
from halocline.hal.ops.indexer import IndexQuery

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Recipe
    from halocline.hal.ops import Ops
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.compressor import CompressorState
    from halocline.hal.ops.kv_cache import CacheHandle
    from halocline.hal.ops.rope import RopeTable
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.weight_source import Scope

__all__ = ["Compressor", "Indexer"]

# Bytes of index logits that may live at once: long prefills are scored in slices of tokens.
_LOGITS_BYTES = 256 << 20


def _join_rows(first: Weight, second: Weight) -> Weight:
    """Two plain matrices of one input, stacked, so that one product serves both."""
    if first.format not in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16) or first.format is not second.format:
        raise ShapeError(f"compressor weights are {first.format.value} and {second.format.value}; both must be plain")
    data = torch.cat((first.data, second.data))
    return replace(first, data=data, shape=tuple(data.shape))


class Compressor:
    """Projects tokens and pools each closed block into one cache row. Replicated on every rank."""

    def __init__(self, config: DeepseekV4Config, ops: Ops, weights: Scope, rope: RopeTable) -> None:
        """Takes `wkv`, `wgate`, `ape` and `norm`."""
        self.ops, self.rope = ops, rope
        joined = _join_rows(weights.matrix("wkv"), weights.matrix("wgate"))
        self.wkv_wgate = ops.gemm.prepare_linear(joined, activation="none")
        self.position_bias_RC = weights.tensor("ape")
        self.norm_weight_D = weights.tensor("norm.weight")
        self.eps = config.rms_norm_eps

    def insert(self, x_TD: Tensor, plan: AttentionPlan, state: CompressorState, cache: CacheHandle) -> None:
        """Feeds a step's tokens; stores every entry whose block they close."""
        projected_T2C = self.ops.gemm.linear(x_TD, self.wkv_wgate, out_dtype=torch.float32)
        values_TC, scores_TC = projected_T2C.chunk(2, dim=-1)
        self.ops.compressor.insert(
            plan,
            values_TC,
            scores_TC,
            self.position_bias_RC,
            self.norm_weight_D,
            self.rope,
            state,
            cache,
            eps=self.eps,
        )


class Indexer:
    """Picks the compressed entries that each query attends to. Replicated on every rank."""

    def __init__(self, config: DeepseekV4Config, recipe: Recipe, ops: Ops, weights: Scope, rope: RopeTable) -> None:
        """Takes `wq_b`, `weights_proj` and the parts of its own compressor."""
        self.ops, self.rope = ops, rope
        self.compressor = Compressor(config, ops, weights / "compressor", rope)
        self.wq_b = ops.gemm.prepare_linear(weights.matrix("wq_b"), activation=recipe.activation)
        self.weights_proj = ops.gemm.prepare_linear(weights.matrix("weights_proj"), activation="none")
        self.num_heads, self.width = config.index_n_heads, config.index_head_dim
        self.num_kept = config.index_topk
        self.rounding = recipe.index_query

    def insert(self, x_TD: Tensor, plan: AttentionPlan, state: CompressorState, keys: CacheHandle) -> None:
        """Feeds a step's tokens to the key compressor."""
        self.compressor.insert(x_TD, plan, state, keys)

    def select(
        self, x_TD: Tensor, q_lora_TQ: Tensor, plan: AttentionPlan, keys: CacheHandle, page_rows: int
    ) -> RowSelection:
        """Slots of the chosen entries in a compressed cache whose pages hold `page_rows` rows."""
        query = self._query(x_TD, q_lora_TQ, plan)
        num_tokens = x_TD.shape[0]
        step = max(1, _LOGITS_BYTES // (4 * max(plan.batch.max_seqlen // 4, 1)))
        parts = [
            self._select_slice(query, plan, keys, page_rows, start, min(start + step, num_tokens))
            for start in range(0, max(num_tokens, 1), step)
        ]
        if len(parts) == 1:
            return parts[0]
        return RowSelection(torch.cat([p.slots_TK for p in parts]), torch.cat([p.lengths_T for p in parts]))

    def _query(self, x_TD: Tensor, q_lora_TQ: Tensor, plan: AttentionPlan) -> IndexQuery:
        q_THI = self.ops.gemm.linear(q_lora_TQ, self.wq_b).unflatten(-1, (self.num_heads, self.width))
        weights_TH = self.ops.gemm.linear(x_TD, self.weights_proj, out_dtype=torch.float32)
        return self.ops.indexer.prepare_query(plan, q_THI, weights_TH, self.rope, rounding=self.rounding)

    def _select_slice(
        self, query: IndexQuery, plan: AttentionPlan, keys: CacheHandle, page_rows: int, start: int, stop: int
    ) -> RowSelection:
        part = IndexQuery(query.q_THI[start:stop], query.weights_TH[start:stop])
        logits_TS = self.ops.indexer.logits(plan, part, keys, first_token=start)
        return self.ops.indexer.select(plan, logits_TS, first_token=start, num_kept=self.num_kept, page_rows=page_rows)
