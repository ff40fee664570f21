"""From a folder to a ready engine: check, choose kernels, read weights, allocate caches.

Everything that can be refused is refused before memory is taken, so a failed start leaves nothing half-loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halocline.engine.admission import ModelLimits
from halocline.engine.config import EngineConfig
from halocline.engine.engine import Engine
from halocline.engine.memory_plan import cache_limit
from halocline.engine.progress import progress_bar
from halocline.engine.prompt import DEFAULT_EFFORT, Prompter, check_effort
from halocline.engine.sampler import Sampler
from halocline.engine.tokenizer import Tokenizer
from halocline.hal.backend import load_backend, load_manifests
from halocline.hal.errors import CheckpointError, ConfigError, lines
from halocline.hal.formats import Recipe, recipe
from halocline.hal.probe import probe
from halocline.hal.runtime import load_ops
from halocline.hal.settings import Settings, process_settings
from halocline.hal.startup import choose_kernels
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource

if TYPE_CHECKING:
    from halocline.engine.graphs import GraphCapture
    from halocline.hal.device import Device
    from halocline.hal.ops import Ops
    from halocline.hal.table import KernelTable
    from halocline.models.interface import CausalModel

__all__ = ["LoadOptions", "LoadedModel", "PreparedModel", "prepare_model"]

# When nobody says: the rest of a GPU is for activations and workspaces; a CPU shares its memory with everything else.
_GPU_FRACTION = 0.9
_CPU_CACHE_BYTES = 4 * 2**30


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
    settings: Settings = field(default_factory=process_settings)
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_effort(self.effort)
        if self.recipe is not None:
            recipe(self.recipe)
        if self.memory_fraction is not None and self.cache_bytes is not None:
            raise ConfigError("memory_fraction and cache_bytes are both given; give one")


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel:
    """A model that is ready.

    Attributes:
        options: What was asked for.
        recipe: Numeric recipe in force.
        kernels: Which kernel serves each op.
        limits: What bounds a request.
        prompter: Renders prompts.
        engine: Runs requests.
    """

    options: LoadOptions
    recipe: Recipe
    kernels: KernelTable
    limits: ModelLimits
    prompter: Prompter
    engine: Engine


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedModel:
    """A checkpoint that was checked and can be loaded; nothing of it is in memory yet.

    Attributes:
        options: What was asked for.
        checkpoint: Its files.
        prompter: Renders prompts.
        limits: What bounds a request.
    """

    options: LoadOptions
    checkpoint: Checkpoint
    prompter: Prompter
    limits: ModelLimits

    def load(self) -> LoadedModel:
        """Loads it onto this machine's device.

        Raises:
            InputError: Kernels or options do not fit the model.
            MachineError: Device or memory do not suffice.
        """
        options, checkpoint = self.options, self.checkpoint
        device = probe(options.settings)
        chosen = recipe(options.recipe or ("served" if device.is_gpu else "recipe"))
        table = choose_kernels(
            lambda device, layout: checkpoint.family.kernel_requests(
                checkpoint.config, chosen, prefill_layout=layout, cache_dialect=device.fp8_dialect
            ),
            settings=options.settings,
            flags=options.kernels,
            device=device,
            graphs=bool(options.graph_sizes),
        )
        ops_of_layer = functools.cache(functools.partial(load_ops, table))
        model = _read_weights(checkpoint, chosen, table, ops_of_layer, options)
        capture = None if table.watch is not None else load_backend(load_manifests(), device.vendor)
        engine = _make_engine(model, checkpoint, device, load_ops(table), options, capture)
        return LoadedModel(
            options=options,
            recipe=chosen,
            kernels=table,
            limits=engine.limits,
            prompter=self.prompter,
            engine=engine,
        )


def prepare_model(options: LoadOptions) -> PreparedModel:
    """Checks a checkpoint: configuration, files, tokenizer.

    Raises:
        InputError: They do not fit each other or the options.
    """
    checkpoint = Checkpoint.open(options.model)
    config = checkpoint.config
    longest = config.max_position_embeddings
    if options.max_positions is not None and not 1 <= options.max_positions <= longest:
        raise ConfigError(
            lines(
                "the longest context is out of range",
                asked=f"max_positions={options.max_positions}",
                found=f"a model of {longest} positions",
                try_=f"1 to {longest}",
            )
        )
    return PreparedModel(
        options=options,
        checkpoint=checkpoint,
        prompter=_prompter(checkpoint, options),
        limits=ModelLimits(
            vocab_size=config.vocab_size,
            max_tokens=options.max_positions or longest,
            eos_ids=config.eos_token_ids,
        ),
    )


def _prompter(checkpoint: Checkpoint, options: LoadOptions) -> Prompter:
    tokenizer = Tokenizer.from_dir(checkpoint.folder)
    config = checkpoint.config
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            lines(
                f"tokenizer.json and config.json of {checkpoint.folder} belong to different models",
                asked=f"token ids up to {tokenizer.vocab_size - 1}",
                found=f"vocab_size {config.vocab_size}",
                try_="copy both files from one release",
            )
        )
    return Prompter(
        tokenizer, bos_id=config.bos_token_id, model_name=checkpoint.folder.resolve().name, effort=options.effort
    )


def _read_weights(
    checkpoint: Checkpoint,
    chosen: Recipe,
    table: KernelTable,
    ops_of_layer: Callable[[int], Ops],
    options: LoadOptions,
) -> CausalModel:
    """Builds the network while its weights are read; draft layers are left out."""
    device = table.device.torch_device
    with (
        progress_bar("loading weights", checkpoint.nbytes, unit="B", shown=options.progress) as advance,
        CheckpointSource(checkpoint, device=device, progress=lambda done, _: advance(done)) as source,
    ):
        model = checkpoint.family.build(
            checkpoint.config,
            chosen,
            ops_of_layer,
            source,
            prefill_layout=table.prefill_layout,
            max_positions=options.max_positions,
            device=device,
            with_draft=False,
        )
        source.finish(without_prefixes=("mtp.",))
    return model


def _make_engine(
    model: CausalModel,
    checkpoint: Checkpoint,
    device: Device,
    ops: Ops,
    options: LoadOptions,
    capture: GraphCapture | None,
) -> Engine:
    """Sizes the caches by what is left beside the weights, allocates them and warms up."""
    max_requests = (256 if device.is_gpu else 32) if options.max_requests is None else options.max_requests
    max_step_tokens = max(8192 if device.is_gpu else 1024, max_requests)
    config = EngineConfig(
        cache_bytes=_cache_bytes(device, options),
        max_requests=max_requests,
        max_positions=options.max_positions,
        max_step_tokens=max_step_tokens if options.max_step_tokens is None else options.max_step_tokens,
        prefix_caching=options.prefix_caching,
        graph_sizes=_graph_sizes(options, max_requests) if capture is not None else (),
        eos_ids=checkpoint.config.eos_token_ids,
    )
    sampler = Sampler(max_requests, model.vocab_size, ops, device.torch_device)
    return Engine(model, sampler, config, device=device.torch_device, capture=capture)


def _graph_sizes(options: LoadOptions, max_requests: int) -> tuple[int, ...]:
    """As asked for, else powers of two up to the requests in flight, and these."""
    if options.graph_sizes is not None:
        return options.graph_sizes
    return (*(1 << bit for bit in range((max_requests - 1).bit_length())), max_requests)


def _cache_bytes(device: Device, options: LoadOptions) -> int:
    """Bytes that the caches may take, now that the weights are there."""
    total, used = _memory(device)
    if options.cache_bytes is not None:
        return cache_limit(total_bytes=total, used_bytes=used, limit_bytes=options.cache_bytes)
    if options.memory_fraction is not None or device.is_gpu:
        fraction = _GPU_FRACTION if options.memory_fraction is None else options.memory_fraction
        return cache_limit(total_bytes=total, used_bytes=used, fraction=fraction)
    return min(total - used, _CPU_CACHE_BYTES)


def _memory(device: Device) -> tuple[int, int]:
    """Total and used bytes of the memory in which caches lie; what the system can reclaim is not used."""
    if device.is_gpu:
        free, total = torch.get_device_module(device.torch_device).mem_get_info()
        return total, total - free
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(facts[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, total - free
