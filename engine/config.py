"""EngineConfig: what a caller decides about an engine. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halocline.hal.errors import ConfigError

__all__ = ["EngineConfig"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and switches of an engine; `resolve` fills in what depends on the model.

    Attributes:
        cache_bytes: Bytes for all caches; see `memory_plan.cache_limit` for a share of a device.
        max_requests: Requests in flight.
        max_positions: Longest context of a request, prompt and output together. None takes the model's.
        max_step_tokens: Tokens of a step, decode and prefill together.
        max_chunk_tokens: Prefill tokens of one request in a step; None allows the whole step.
        window_page_rows: Rows of a window page.
        page_tokens: Tokens of a token page: the granularity of prefix reuse.
        prefix_caching: Whether finished work is kept for prompts that begin alike.
        num_snapshots: Resume points that the prefix cache may keep. None means twice `max_requests`, 256 at most.
        overlap: Whether a step is launched before the tokens of the last one are read.
        priority_steps: Steps by which one unit of priority moves a request forward in the queue. A request is
            overtaken by later ones for no longer than that, so none starves.
        graph_sizes: Batch sizes for which decode steps are captured; empty runs everything eagerly.
        warm_up_tokens: Numbers of prefill tokens that are tried on padding before the engine is ready, so that a device
            that compiles its kernels on first use does it then; a CPU has nothing to gain from more than one token.
        eos_ids: Tokens with which the model ends its output.
        debug_tags: Whether cached rows are tagged with what they are and checked when read: slow, eager only.
        max_token_pages: Upper bound of token pages, for tests and small machines.
    """

    cache_bytes: int
    max_requests: int = 256
    max_positions: int | None = None
    max_step_tokens: int = 8192
    max_chunk_tokens: int | None = None
    window_page_rows: int = 64
    page_tokens: int = 256
    prefix_caching: bool = True
    num_snapshots: int | None = None
    overlap: bool = True
    priority_steps: int = 256
    graph_sizes: tuple[int, ...] = ()
    warm_up_tokens: tuple[int, ...] = (1,)
    eos_ids: tuple[int, ...] = ()
    debug_tags: bool = False
    max_token_pages: int | None = None

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "max_requests", "max_step_tokens", "window_page_rows", "page_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("max_positions", "max_chunk_tokens", "max_token_pages"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("num_snapshots", "priority_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: 0 or more is needed")
        if self.max_step_tokens < self.max_requests:
            raise ConfigError(
                f"max_step_tokens={self.max_step_tokens} cannot hold one token of each of "
                f"max_requests={self.max_requests} requests"
            )
        if any(size < 1 or size > self.max_requests for size in self.graph_sizes):
            raise ConfigError(f"graph_sizes={self.graph_sizes}: sizes from 1 to max_requests={self.max_requests}")
        if any(size < 1 or size > self.max_step_tokens for size in self.warm_up_tokens):
            raise ConfigError(f"warm_up_tokens={self.warm_up_tokens}: 1 to max_step_tokens={self.max_step_tokens}")
        if self.debug_tags and self.graph_sizes:
            raise ConfigError("debug_tags checks rows on the host, which captured graphs leave out: graph_sizes=()")

    def resolve(self, model_positions: int) -> EngineConfig:
        """A configuration without open values.

        Raises:
            ConfigError: If a longer context is asked for than the model has.
        """
        positions = self.max_positions or model_positions
        if positions > model_positions:
            raise ConfigError(f"max_positions={positions}: the model's longest context is {model_positions}")
        snapshots = min(2 * self.max_requests, 256) if self.num_snapshots is None else self.num_snapshots
        return replace(
            self,
            max_positions=positions,
            num_snapshots=snapshots if self.prefix_caching else 0,
            max_chunk_tokens=min(self.max_chunk_tokens or self.max_step_tokens, self.max_step_tokens),
            graph_sizes=tuple(sorted(set(self.graph_sizes))),
        )
