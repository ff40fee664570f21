"""The network: embedding, blocks, collapse of the streams, norm, logits.

Shapes: T tokens, N streams (or rows whose logits are wanted), D hidden lanes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from halocline.models.deepseek_v4.block import Block
from halocline.models.deepseek_v4.cache import DeepseekV4Cache, allocate_cache, cache_plan
from halocline.models.deepseek_v4.hyper_connection import HyperConnectionHead
from halocline.models.deepseek_v4.mtp import MultiTokenPrediction
from halocline.models.interface import CachePlan, StepOutput
from halocline.models.layers.embedding import Embedding, Head
from halocline.models.layers.rotary import inverse_frequencies, rotary_table
from halocline.models.layers.routed_experts import ExpertTokens, gather_tokens
from halocline.models.parallel import SINGLE, Parallel
from halocline.models.weight_source import Scope, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Recipe
    from halocline.hal.ops import Ops
    from halocline.hal.ops.attention import AttentionPlan, PrefillLayout
    from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
    from halocline.hal.ops.rope import RopeTable
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["DeepseekV4Model"]


class DeepseekV4Model:
    """DeepSeek-V4 over bound kernels. It keeps weights only; caches, plans and batches come as arguments.

    Hidden states, streams and logits are complete on every rank: each part that is split over ranks says so, and
    reduces its own partial sums.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        recipe: Recipe,
        ops_of_layer: Callable[[int], Ops],
        source: WeightSource,
        *,
        prefill_layout: PrefillLayout = "ragged",
        max_positions: int | None = None,
        device: str = "cpu",
        with_draft: bool = True,
        ropes: Mapping[int, RopeTable] | None = None,
        parallel: Parallel = SINGLE,
    ) -> None:
        """Builds all modules, which take their weights from `source` one by one.

        Args:
            config: The model.
            recipe: Numeric recipe.
            ops_of_layer: Bound kernels of each layer; draft layers count on behind the main ones.
            source: Weights by release name, those of this rank.
            prefill_layout: The value decided at start-up.
            max_positions: Longest context to serve; the configuration's when left out.
            device: Where rotary tables and caches go, in torch's words.
            with_draft: Whether to build the draft layers.
            ropes: Rotary tables of another instance of the same model (`self.ropes`), to share them.
            parallel: This rank's place, and the groups it exchanges tensors with. Each rank builds the network so, and
                all call its methods in the same order with the same number of (padded) tokens.
        """
        weights = Scope(source=source)
        self.config, self.recipe, self.ops_of_layer = config, recipe, ops_of_layer
        self.prefill_layout, self.device, self.parallel = prefill_layout, device, parallel
        self.max_positions = max_positions or config.max_position_embeddings
        self.compute_dtype = torch.float32 if recipe.compute == "float32" else torch.bfloat16
        self.ops = ops_of_layer(0)
        self.ropes = ropes or {ratio: self._rope(ratio) for ratio in set(config.compress_ratios)}

        def rope_of(layer: int) -> RopeTable:
            return self.ropes[config.compress_ratios[layer]]

        self.embedding = Embedding(config.vocab_size, self.ops, weights, parallel.attention)
        self.blocks = [
            Block(config, recipe, layer, ops_of_layer(layer), weights / f"layers.{layer}", rope_of(layer), parallel)
            for layer in range(config.num_hidden_layers)
        ]
        self.collapse = HyperConnectionHead(config, self.ops, weights)
        self.norm_D = weights.tensor("norm.weight")
        self.head = Head(self.ops, weights, parallel.attention)
        first_draft = config.num_hidden_layers
        self.mtp = [
            MultiTokenPrediction(
                config,
                recipe,
                index,
                ops_of_layer(first_draft + index),
                weights / f"mtp.{index}",
                rope_of(first_draft + index),
                parallel,
            )
            for index in range(config.num_mtp_layers if with_draft else 0)
        ]

    def _rope(self, ratio: int) -> RopeTable:
        settings = self.config.rope_for(ratio)
        yarn = settings.yarn
        frequencies = (
            inverse_frequencies(settings.theta, settings.width)
            if yarn is None
            else inverse_frequencies(
                settings.theta,
                settings.width,
                factor=yarn.factor,
                beta_fast=yarn.beta_fast,
                beta_slow=yarn.beta_slow,
                original_positions=yarn.original_max_position_embeddings,
            )
        )
        return rotary_table(frequencies, self.max_positions, device=self.device)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    def cache_plan(self, *, window_page_rows: int, page_tokens: int) -> CachePlan:
        """Layouts and sizes of the caches for these page sizes."""
        return cache_plan(
            self.config,
            self.recipe,
            window_page_rows=window_page_rows,
            page_tokens=page_tokens,
            max_positions=self.max_positions,
        )

    def allocate_cache(
        self, plan: CachePlan, *, num_window_pages: int, num_token_pages: int, num_state_slots: int
    ) -> DeepseekV4Cache:
        """Allocates the caches through the bound backend."""
        return allocate_cache(
            self.config,
            plan,
            self.ops_of_layer,
            num_window_pages=num_window_pages,
            num_token_pages=num_token_pages,
            num_state_slots=num_state_slots,
            device=self.device,
        )

    def plan_step(self, batch: BatchMetadata, geometry: CacheGeometry, *, reuse: AttentionPlan | None) -> AttentionPlan:
        """Builds or refreshes the attention plan of a step, outside graph capture."""
        return self.ops.attention.plan(batch, geometry, self.prefill_layout, reuse=reuse)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings (tokens, hidden) in the compute type; ids of padding may be anything in range."""
        return self.embedding(token_ids_T, self.compute_dtype)

    def _tokens(self, token_ids_T: Tensor, batch: BatchMetadata) -> ExpertTokens:
        """What all layers of a step know of its tokens, gathered once."""
        return gather_tokens(self.ops, self.parallel, self.config.n_routed_experts, token_ids_T, batch.positions_T)

    @property
    def distinct_layers(self) -> tuple[int, ...]:
        """One layer of each kind: all others launch what these do, on other weights."""
        first: dict[Hashable, int] = {}
        for layer, block in enumerate(self.blocks):
            first.setdefault(block.kind, layer)
        return tuple(first.values())

    def forward(
        self, batch: BatchMetadata, plan: AttentionPlan, cache: DeepseekV4Cache, *, layers: Sequence[int] | None = None
    ) -> StepOutput:
        """Runs all layers, or for a trial some, over the tokens of a step, writing their cache rows."""
        embedded_TD = self.embed(batch.token_ids_T)
        streams_TND = embedded_TD[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        tokens = self._tokens(batch.token_ids_T, batch)
        for layer in range(len(self.blocks)) if layers is None else layers:
            streams_TND = self.blocks[layer].forward(streams_TND, tokens, plan, cache.layers[layer])
        hidden_TD = self.ops.norm.rms_norm(self.collapse(streams_TND), self.norm_D, eps=self.config.rms_norm_eps)
        return StepOutput(hidden_TD=hidden_TD, streams_TND=streams_TND)

    def draft_logits(
        self,
        streams_TND: Tensor,
        next_token_ids_T: Tensor,
        plan: AttentionPlan,
        cache: DeepseekV4Cache,
        *,
        index: int = 0,
    ) -> Tensor:
        """float32 (tokens, vocabulary) logits of the token after next, by MTP layer `index`."""
        mtp = self.mtp[index]
        layer_cache = cache.layers[mtp.layer]
        tokens = self._tokens(next_token_ids_T, plan.batch)
        hidden_TD = mtp.forward(streams_TND, self.embed(next_token_ids_T), tokens, plan, layer_cache)
        return self.compute_logits(hidden_TD)

    def compute_logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 (rows, vocabulary) logits of chosen rows of `StepOutput.hidden_TD`."""
        return self.head(hidden_ND)
