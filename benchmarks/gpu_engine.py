"""A checkpoint on a device through the engine, with chosen kernels, from token ids to token ids.

It needs neither the package that renders prompts nor a server's: a GPU machine without a network may lack them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halocline.benchmarks.gpu_sizes import KERNEL_SETS
from halocline.engine.admission import admit
from halocline.engine.config import EngineConfig
from halocline.engine.engine import Engine
from halocline.engine.request import Request
from halocline.engine.sampler import Sampler
from halocline.engine.sampling_params import SamplingParams
from halocline.engine.warm_up import kernel_builder, warm_up_tokens
from halocline.hal.backend import load_backend, load_manifests
from halocline.hal.formats import recipe
from halocline.hal.probe import probe
from halocline.hal.runtime import load_ops
from halocline.hal.settings import process_settings
from halocline.hal.startup import choose_kernels
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource

if TYPE_CHECKING:
    from halocline.hal.table import KernelTable

__all__ = ["PORTABLE", "GpuModel", "kernel_flags", "load_model"]

PORTABLE = KERNEL_SETS["portable"]


def kernel_flags(name: str) -> tuple[str, ...]:
    """The overrides of a kernel set on this machine: a CPU has the reference alone, whatever the set."""
    return KERNEL_SETS[name] if probe(process_settings()).is_gpu else ()


@dataclass(frozen=True, eq=False, kw_only=True)
class GpuModel:
    """A loaded model with its engine."""

    table: KernelTable
    engine: Engine

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
        """Greedy continuations, all together.

        Raises:
            RuntimeError: If a request ends with an error.
        """
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        requests = []
        for number, prompt in enumerate(prompts):
            admitted = admit(prompt, params, self.engine.limits)
            request = Request(f"r{number}", admitted, arrival_time=time.monotonic())
            self.engine.add(request)
            requests.append(request)
        self.engine.run()
        failed = next((request for request in requests if request.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"request {failed.id} failed: {failed.error}")
        return [list(request.output_ids) for request in requests]


def load_model(
    folder: Path,
    kernels: Sequence[str],
    *,
    graph_sizes: tuple[int, ...] = (),
    max_requests: int = 32,
    max_positions: int = 8192,
    max_step_tokens: int = 2048,
    warms_up: bool = False,
) -> GpuModel:
    """Loads a checkpoint in the served recipe onto this machine's device.

    Args:
        folder: Of the checkpoint.
        kernels: Overrides, as `--kernel` takes them.
        graph_sizes: Batch sizes to capture; none runs eagerly, as does a device without graphs.
        max_requests: Requests in flight.
        max_positions: Longest context.
        max_step_tokens: Tokens of a step.
        warms_up: Whether it compiles everything before it is ready, as `halocline serve` does on a GPU; else only what
            the smallest steps need.
    """
    settings = process_settings()
    device = probe(settings)
    checkpoint, chosen = Checkpoint.open(folder), recipe("served")
    table = choose_kernels(
        lambda device, layout: checkpoint.family.kernel_requests(
            checkpoint.config, chosen, prefill_layout=layout, cache_dialect=device.fp8_dialect
        ),
        settings=settings,
        flags=kernels,
        device=device,
        graphs=bool(graph_sizes),
    )
    with CheckpointSource(checkpoint, device=device.torch_device) as source:
        model = checkpoint.family.build(
            checkpoint.config,
            chosen,
            functools.cache(functools.partial(load_ops, table)),
            source,
            prefill_layout=table.prefill_layout,
            max_positions=max_positions,
            device=device.torch_device,
            with_draft=False,
        )
    config = EngineConfig(
        cache_bytes=2 * 2**30 if device.is_gpu else 2**28,
        max_requests=max_requests,
        max_positions=max_positions,
        max_step_tokens=max_step_tokens,
        graph_sizes=graph_sizes,
        warm_up_tokens=warm_up_tokens(max_step_tokens, compiles=warms_up and device.is_gpu),
        eos_ids=checkpoint.config.eos_token_ids,
    )
    sampler = Sampler(max_requests, model.vocab_size, load_ops(table), device.torch_device)
    backend = load_backend(load_manifests(), device.vendor) if graph_sizes or warms_up else None
    build = kernel_builder(table, backend) if warms_up else None
    if warms_up:
        sampler.warm_up(build)
    engine = Engine(model, sampler, config, device=device.torch_device, capture=backend, build=build)
    return GpuModel(table=table, engine=engine)
