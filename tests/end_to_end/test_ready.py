"""Once an engine is ready, no step brings a launch that Triton would compile anew.

An engine runs on portable kernels that are recorded instead of launched. Each launch has the key by which Triton
compiles it: constants, types, and which numbers are 1 or multiples of 16. A warm-up has to meet all keys that prompts
of any length, in any company, bring later.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget

from halocline.engine.admission import admit
from halocline.engine.config import EngineConfig
from halocline.engine.engine import Engine
from halocline.engine.graphs import RerunCapture
from halocline.engine.request import Request
from halocline.engine.sampler import Sampler
from halocline.engine.sampling_params import SamplingParams
from halocline.engine.warm_up import warm_up_tokens
from halocline.hal.backend import load_manifests
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.ops.attention import PrefillLayout
from halocline.hal.runtime import prepare_name
from halocline.kernels_portable.aot import Launch, compile_key, recording
from halocline.kernels_portable.target import Target
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4 import compressor
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import VENDOR_TINY

DEVICES = {
    "sm_90": (GPUTarget("cuda", 90, 32), Target(shared_memory=227 << 10, wave_size=32, num_processors=132)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Target(shared_memory=64 << 10, wave_size=64, num_processors=304)),
}
SOME_TOKEN = 5


@dataclass(eq=False)
class Compiler:
    """Keys of all launches so far; `since` are those that came after `ready`."""

    target: GPUTarget
    known: set[tuple[Any, ...]] = field(default_factory=set)
    since: list[tuple[Any, ...]] = field(default_factory=list)
    is_ready: bool = False

    def take(self, launch: Launch) -> None:
        if launch.name == "pick_tokens":  # its result is an index on the host's side too
            launch.arguments["out_ptr"].fill_(SOME_TOKEN)
        key = compile_key(launch, self.target)
        if key not in self.known:
            self.known.add(key)
            if self.is_ready:
                self.since.append(key)


def portable_ops() -> Ops:
    """Every op by the kernel that NVIDIA's manifest calls `triton` or, where there is none, one of torch."""
    kernels: dict[str, Callable[..., Any]] = {}

    def load(path: str) -> Callable[..., Any]:
        module, _, name = path.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    (manifest,) = (manifest for manifest in load_manifests() if manifest.name == "cuda")
    for spec in manifest.specs:
        if spec.name == "triton" or (spec.name in ("torch", "nccl") and spec.op not in kernels):
            kernels[spec.op] = load(spec.target)
            if spec.prepare:
                kernels[prepare_name(spec.op)] = load(spec.prepare)
    return Ops(kernels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of all kinds of layers in the shapes of the released ones."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, VENDOR_TINY.without_draft(), seed=1)
    return path


@contextmanager
def made_engine(
    folder: Path, device: str, layout: PrefillLayout, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[Any]:
    """An engine that is ready on a device of which only the facts are there, and the record of its compiler."""
    compiled_for, facts = DEVICES[device]
    compiler, ops = Compiler(compiled_for), portable_ops()
    for name, module in [*sys.modules.items()]:
        if name.startswith("halocline.backends_triton.") and hasattr(module, "target_of"):
            monkeypatch.setattr(module, "target_of", lambda device: facts)
    checkpoint = Checkpoint.open(folder)
    with recording(compiler.take):
        with CheckpointSource(checkpoint) as source:
            model = checkpoint.family.build(
                checkpoint.config,
                recipe("served"),
                lambda layer: ops,
                source,
                prefill_layout=layout,
                max_positions=4096,
                with_draft=False,
            )
        config = EngineConfig(
            cache_bytes=1 << 26,
            warm_up_tokens=warm_up_tokens(options["max_step_tokens"], compiles=True),
            max_positions=4096,
            **options,
        )
        sampler = Sampler(config.max_requests, model.vocab_size, ops, "cpu")
        sampler.warm_up()
        engine = Engine(model, sampler, config, capture=RerunCapture())
        compiler.is_ready = True
        yield engine, compiler


def generate(engine: Engine, prompts: list[list[int]], **params: Any) -> None:
    requests = []
    for number, prompt in enumerate(prompts):
        admitted = admit(prompt, SamplingParams(temperature=0.0, **params), engine.limits)
        requests.append(Request(f"r{number}", admitted, arrival_time=time.monotonic()))
        engine.add(requests[-1])
    engine.run()
    assert [request.error for request in requests] == [None] * len(prompts)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 500), k=length)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["paged", "ragged"])
@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4, 8, 16, 24)])
def test_nothing_is_compiled_once_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, layout: PrefillLayout, graph_sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(compressor, "_LOGITS_BYTES", 4 * 75 * 1000)  # slices begin anywhere
    options = {"max_requests": 24, "max_step_tokens": 600, "graph_sizes": graph_sizes}
    with made_engine(folder, device, layout, monkeypatch, **options) as (engine, compiler):
        for seed, length in enumerate((1, 2, 3, 17, 64, 65, 127, 255, 300, 513, 600, 601, 999, 2000, 4000)):
            generate(engine, [prompt_of(length, seed)], max_tokens=3)
        for count in (2, 3, 5, 7, 9, 17, 23, 24, 31):
            generate(
                engine, [prompt_of(17 + 7 * index % 40, 100 * count + index) for index in range(count)], max_tokens=3
            )
        mixed = [prompt_of(length, length) for length in (5, 700, 33, 1, 260, 1500, 8, 90, 611, 16, 3000, 2)]
        generate(engine, mixed, max_tokens=40)
        generate(engine, [mixed[1] + [7], [*mixed[5][:1400], 9, 9], mixed[10] + [3, 4, 5]], max_tokens=5)
        assert engine.stats().hits > 0
        generate(engine, [prompt_of(300, 7), prompt_of(20, 8)], max_tokens=3, prompt_logprobs=2, logprobs=2)
    assert len(compiler.known) > 60
    assert [(key[1], *key[2:]) for key in compiler.since] == []
