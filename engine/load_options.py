"""LoadOptions: what a caller decides about a model to be loaded. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halocline.engine.prompt import DEFAULT_EFFORT, check_effort
from halocline.hal.errors import ConfigError
from halocline.hal.formats import recipe
from halocline.hal.settings import Settings, process_settings
from halocline.models.parallel import AllToAll, ParallelSizes

__all__ = ["LoadOptions"]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a caller decides about a model to be loaded.

    Attributes:
        model: Folder of the checkpoint.
        recipe: Numeric recipe; None is `served` on a GPU and `recipe` on a CPU.
        kernels: Kernel overrides, as `--kernel` takes them.
        effort: Reasoning effort of chat turns that state none.
        max_requests: Requests in flight; None is 256 on a GPU and 32 on a CPU.
        max_positions: Longest context, prompt and output together; None is the model's.
        max_step_tokens: Tokens of a step; None is 8192 on a GPU and 1024 on a CPU.
        memory_fraction: Share of the device's memory to use in all; None is 0.9 on a GPU.
        cache_bytes: Bytes of the caches, instead of a share; at most 4 GiB on a CPU if neither is given.
        prefix_caching: Whether finished work is kept for prompts that begin alike.
        graph_sizes: Batch sizes whose decode steps are captured; None is powers of two where the device has graphs and
            nothing looks into the steps (comparison, recording), empty is none.
        sizes: Over how many ranks the model is spread; more than one takes a launcher: see docs/scaling.md.
        a2a: How tokens reach the ranks that hold their experts.
        settings: Of the process when left out.
        progress: Whether to draw bars; None draws them if stderr is a terminal.
    """

    model: Path
    recipe: str | None = None
    kernels: Sequence[str] = ()
    effort: str = DEFAULT_EFFORT
    max_requests: int | None = None
    max_positions: int | None = None
    max_step_tokens: int | None = None
    memory_fraction: float | None = None
    cache_bytes: int | None = None
    prefix_caching: bool = True
    graph_sizes: tuple[int, ...] | None = None
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    a2a: AllToAll = "none"
    settings: Settings = field(default_factory=process_settings)
    progress: bool | None = None

    @classmethod
    def from_plain(cls, *, model: str, sizes: Sequence[int] = (1, 1, 1), **options: Any) -> LoadOptions:
        """From data that can be sent to another process: the folder as text, sizes as tp, dp, ep."""
        tp, dp, ep = sizes
        return cls(model=Path(model), sizes=ParallelSizes(tp=tp, dp=dp, ep=ep), **options)

    def __post_init__(self) -> None:
        check_effort(self.effort)
        if self.recipe is not None:
            recipe(self.recipe)
        if self.memory_fraction is not None and self.cache_bytes is not None:
            raise ConfigError("memory_fraction and cache_bytes are both given; give one")
