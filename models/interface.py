"""What the engine asks of a network. Everything above this line is the same for every model.

Shapes: T tokens of a step, N rows whose logits are wanted, D hidden lanes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import CacheLayout
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.batch import BatchMetadata, CacheGeometry

__all__ = ["CachePlan", "CausalModel", "ModelCache", "StepOutput"]


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """What a model's caches take, computed from the configuration alone and equal to what is allocated.

    Attributes:
        geometry: Sizes that tie positions to rows.
        window_layouts: Layout of the window cache of each layer that has one (draft layers included).
        token_layouts: Layouts of all caches addressed by token pages: compressed rows and index keys.
        state_bytes_per_slot: Bytes of compressor state that one request slot takes over all layers.
    """

    geometry: CacheGeometry
    window_layouts: tuple[CacheLayout, ...]
    token_layouts: tuple[CacheLayout, ...]
    state_bytes_per_slot: int

    @property
    def window_page_bytes(self) -> int:
        """Bytes that one window page takes over all layers."""
        return sum(layout.page_stride for layout in self.window_layouts)

    @property
    def token_page_bytes(self) -> int:
        """Bytes that one token page takes over all layers."""
        return sum(layout.page_stride for layout in self.token_layouts)

    def total_bytes(self, *, num_window_pages: int, num_token_pages: int, num_state_slots: int) -> int:
        """Bytes of the whole cache of these sizes."""
        return (
            num_window_pages * self.window_page_bytes
            + num_token_pages * self.token_page_bytes
            + num_state_slots * self.state_bytes_per_slot
        )


class ModelCache(Protocol):
    """All caches of a model: handles by layer and compressor state. Explicit; nothing is kept in modules."""

    @property
    def plan(self) -> CachePlan:
        """What it takes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    def copy_state(self, sources: list[int], targets: list[int]) -> None:
        """Copies compressor state between slots, for snapshots of a prefix."""
        ...


@dataclass(eq=False, kw_only=True)
class StepOutput:
    """What a forward pass gives.

    Attributes:
        hidden_TD: Normed hidden states of all tokens of the step (padding undefined).
        streams_TND: Residual streams before the final collapse: input of draft layers.
    """

    hidden_TD: Tensor
    streams_TND: Tensor


class CausalModel(Protocol):
    """A network behind the engine."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest context."""
        ...

    def cache_plan(self, *, window_page_rows: int, page_tokens: int) -> CachePlan:
        """Layouts and sizes of the caches for these page sizes."""
        ...

    def allocate_cache(
        self, plan: CachePlan, *, num_window_pages: int, num_token_pages: int, num_state_slots: int
    ) -> ModelCache:
        """Allocates the caches through the bound backend."""
        ...

    def plan_step(self, batch: BatchMetadata, geometry: CacheGeometry, *, reuse: AttentionPlan | None) -> AttentionPlan:
        """Builds or refreshes the attention plan of a step, outside graph capture."""
        ...

    @property
    def distinct_layers(self) -> tuple[int, ...]:
        """One layer of each kind: all others launch what these do, on other weights."""
        ...

    def forward(
        self, batch: BatchMetadata, plan: AttentionPlan, cache: ModelCache, *, layers: Sequence[int] | None = None
    ) -> StepOutput:
        """Runs all layers, or for a trial some, over the tokens of a step, writing their cache rows."""
        ...

    def compute_logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 (rows, vocabulary) logits of chosen rows of `StepOutput.hidden_TD`."""
        ...
