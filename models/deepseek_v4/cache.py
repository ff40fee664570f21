"""The caches of a DeepSeek-V4 model: what they take, and the handles of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from halocline.hal.errors import ConfigError
from halocline.hal.formats import CacheLayout, Recipe, cache_layout
from halocline.hal.ops.batch import CacheGeometry
from halocline.models.interface import CachePlan

if TYPE_CHECKING:
    from typing import Literal

    from halocline.hal.ops import Ops
    from halocline.hal.ops.compressor import CompressorState
    from halocline.hal.ops.kv_cache import CacheHandle
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["DeepseekV4Cache", "LayerCache", "allocate_cache", "cache_plan"]

LARGEST_RATIO = 128


@dataclass(eq=False, kw_only=True)
class LayerCache:
    """Handles of one layer. A layer of ratio 0 has a window only; the indexer's two belong to ratio 4."""

    window: CacheHandle
    compressed: CacheHandle | None = None
    state: CompressorState | None = None
    index_keys: CacheHandle | None = None
    index_state: CompressorState | None = None


@dataclass(eq=False, kw_only=True)
class DeepseekV4Cache:
    """Caches of all layers, draft layers last.

    Attributes:
        plan: Layouts and sizes.
        layers: Handles of each layer.
        states: Compressor state of each ratio. The lanes of all its compressors lie side by side in one ring, layer
            after layer and the indexer's behind its layer's, so that a slot is copied as one piece; the states of
            `layers` are views of some of the lanes.
    """

    plan: CachePlan
    layers: list[LayerCache] = field(default_factory=list)
    states: list[CompressorState] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        handles = [h for c in self.layers for h in (c.window, c.compressed, c.index_keys) if h is not None]
        return sum(handle.pages.nbytes for handle in handles) + sum(s.rows_SB2C.nbytes for s in self.states)

    def copy_state(self, sources: list[int], targets: list[int]) -> None:
        """Copies compressor state between slots; all sources are read before a target is written."""
        import torch

        if not self.states:
            return
        sources_N, targets_N = torch.tensor([sources, targets], device=self.states[0].rows_SB2C.device)
        for state in self.states:
            state.rows_SB2C.index_copy_(0, targets_N, state.rows_SB2C.index_select(0, sources_N))


def _layouts(config: DeepseekV4Config, recipe: Recipe, ratio: int, page_rows: int) -> list[CacheLayout]:
    """Layouts of the token-paged caches of a layer: compressed rows, then index keys for ratio 4."""
    rope = config.qk_rope_head_dim
    layouts = [cache_layout("latent", recipe.latent, width=config.head_dim, rope_width=rope, page_rows=page_rows)]
    if ratio == 4:
        width = config.index_head_dim
        layouts.append(cache_layout("index_key", recipe.index_key, width=width, rope_width=rope, page_rows=page_rows))
    return layouts


def _state_lanes(config: DeepseekV4Config, ratio: int) -> tuple[int, ...]:
    """Projected lanes of each compressor of a layer."""
    if ratio == 0:
        return ()
    return (2 * config.head_dim, 2 * config.index_head_dim) if ratio == 4 else (config.head_dim,)


def _lanes_of_ratios(config: DeepseekV4Config) -> dict[int, int]:
    """Projected lanes of all compressors of each ratio."""
    return {
        ratio: config.compress_ratios.count(ratio) * sum(_state_lanes(config, ratio))
        for ratio in sorted(set(config.compress_ratios) - {0})
    }


def _split(state: CompressorState, config: DeepseekV4Config) -> Iterator[CompressorState]:
    """The states of single compressors, in the order of layers, as views of the state of their ratio."""
    first = 0
    while first < state.rows_SB2C.shape[-1]:
        for lanes in _state_lanes(config, state.ratio):
            yield replace(state, rows_SB2C=state.rows_SB2C[..., first : first + lanes])
            first += lanes


def _ring_rows(ratio: int, extra_rows: int) -> int:
    return (2 * ratio if ratio == 4 else ratio) + extra_rows


def cache_plan(
    config: DeepseekV4Config,
    recipe: Recipe,
    *,
    window_page_rows: int,
    page_tokens: int,
    max_positions: int,
    extra_rows: int = 0,
) -> CachePlan:
    """Computes layouts and sizes from the configuration alone.

    Args:
        config: The model.
        recipe: Row formats.
        window_page_rows: Window rows in a window page.
        page_tokens: Tokens covered by a token page.
        max_positions: Longest context that will be served.
        extra_rows: State ring rows for rejected drafts.

    Raises:
        ConfigError: If a page is no multiple of the compression ratios.
    """
    if page_tokens % LARGEST_RATIO:
        raise ConfigError(f"token pages of {page_tokens} tokens: a multiple of {LARGEST_RATIO} is needed")
    window = cache_layout(
        "latent",
        recipe.latent,
        width=config.head_dim,
        rope_width=config.qk_rope_head_dim,
        page_rows=window_page_rows,
    )
    ratios = [ratio for ratio in config.compress_ratios if ratio]
    state_bytes = sum(
        _ring_rows(ratio, extra_rows) * 2 * lanes * 4 for ratio in ratios for lanes in _state_lanes(config, ratio)
    )
    return CachePlan(
        geometry=CacheGeometry(
            window=config.sliding_window,
            window_page_rows=window_page_rows,
            page_tokens=page_tokens,
            ratios=tuple(sorted(set(ratios))),
            index_topk=config.index_topk,
            max_positions=max_positions,
        ),
        window_layouts=(window,) * len(config.compress_ratios),
        token_layouts=tuple(
            layout for ratio in ratios for layout in _layouts(config, recipe, ratio, page_tokens // ratio)
        ),
        state_bytes_per_slot=state_bytes,
    )


def allocate_cache(
    config: DeepseekV4Config,
    plan: CachePlan,
    ops_of_layer: Callable[[int], Ops],
    *,
    num_window_pages: int,
    num_token_pages: int,
    num_state_slots: int,
    device: str,
    extra_rows: int = 0,
    storage: Literal["bytes", "autograd"] = "bytes",
) -> DeepseekV4Cache:
    """Allocates every cache of `plan` through the kernels bound for its layer.

    Args:
        config: The model.
        plan: From `cache_plan`.
        ops_of_layer: Bound kernels of each layer.
        num_window_pages: Window pages.
        num_token_pages: Token pages.
        num_state_slots: Requests in flight, snapshots included.
        device: Where, in torch's words.
        extra_rows: As for `cache_plan`.
        storage: `autograd` keeps rows differentiable (reference kernels only).

    Raises:
        OutOfPagesError: If the device has not enough memory.
    """
    compressor = ops_of_layer(0).compressor

    def state(ratio: int, lanes: int) -> CompressorState:
        return compressor.allocate_state(num_state_slots, lanes, ratio=ratio, extra_rows=extra_rows, device=device)

    of_ratio = {ratio: state(ratio, lanes) for ratio, lanes in _lanes_of_ratios(config).items()}
    parts = {ratio: _split(owner, config) for ratio, owner in of_ratio.items()}
    cache = DeepseekV4Cache(plan=plan, states=list(of_ratio.values()))
    token_layouts = iter(plan.token_layouts)
    for layer, ratio in enumerate(config.compress_ratios):
        ops = ops_of_layer(layer)

        def pages(layout: CacheLayout, count: int, ops: Ops = ops) -> CacheHandle:
            return ops.kv_cache.allocate(replace(layout, storage=storage), count, device=device)

        entry = LayerCache(window=pages(plan.window_layouts[layer], num_window_pages))
        if ratio:
            entry.compressed, entry.state = pages(next(token_layouts), num_token_pages), next(parts[ratio])
            if ratio == 4:
                entry.index_keys, entry.index_state = pages(next(token_layouts), num_token_pages), next(parts[ratio])
        cache.layers.append(entry)
    return cache
