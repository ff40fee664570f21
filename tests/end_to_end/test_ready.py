"""Once an engine is ready, no step brings a launch that Triton would compile anew.

An engine runs on kernels that are recorded instead of launched. Each launch has the key by which Triton compiles it:
constants, types, and which numbers are 1 or multiples of 16. Calls of libraries that compile have what those compile
by. A warm-up has to meet all keys that prompts of any length, in any company, bring later.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling_stand_ins import (
    Compiler,
    kernels_called,
    library_ops,
)
from triton.backends.compiler import GPUTarget

from halocline.backends_cuda import (
    moe_triton_kernels,
)
from halocline.backends_cuda.make_calls import make
from halocline.backends_cuda.noted_calls import noting
from halocline.engine.admission import admit
from halocline.engine.config import EngineConfig
from halocline.engine.engine import Engine
from halocline.engine.graphs import RerunCapture
from halocline.engine.request import Request
from halocline.engine.sampler import Sampler
from halocline.engine.sampling_params import SamplingParams
from halocline.engine.warm_up import warm_up_tokens
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.ops.attention import PrefillLayout
from halocline.kernels_portable.aot import compile_key, recording
from halocline.kernels_portable.build import distinct_launches
from halocline.kernels_portable.expert_alignment import pairs_of_a_step
from halocline.kernels_portable.gemm_tiles import expert_tiles, gemm_tiles
from halocline.kernels_portable.sparse_attention import attention_tiles, num_attention_splits
from halocline.kernels_portable.stream_mix import MANY_SPLITS, num_mix_splits
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of all kinds of layers in the shapes of the released ones."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, VENDOR_TINY.without_draft(), seed=1)
    return path


@contextmanager
def made_engine(
    folder: Path,
    device: str,
    layout: PrefillLayout,
    monkeypatch: pytest.MonkeyPatch,
    *,
    with_libraries: bool = False,
    build: Callable[[Compiler, Callable[[], None]], None] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """An engine that is ready on a device of which only the facts are there, and the record of its compiler."""
    compiled_for, facts = DEVICES[device]
    compiler = Compiler(compiled_for)
    ops = library_ops(compiler, monkeypatch) if with_libraries else Ops(kernels_called({}))
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
        builder = None if build is None else functools.partial(build, compiler)
        engine = Engine(model, sampler, config, capture=RerunCapture(), build=builder)
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


def serve_all_kinds(engine: Engine) -> None:
    """Prompts of any length, alone and together, in chunks, with cached beginnings and scores of their own tokens."""
    for seed, length in enumerate((1, 2, 3, 17, 64, 65, 127, 255, 300, 513, 600, 601, 999, 2000, 4000)):
        generate(engine, [prompt_of(length, seed)], max_tokens=3)
    for count in (2, 3, 5, 7, 9, 17, 23, 24, 31):
        generate(engine, [prompt_of(17 + 7 * index % 40, 100 * count + index) for index in range(count)], max_tokens=3)
    mixed = [prompt_of(length, length) for length in (5, 700, 33, 1, 260, 1500, 8, 90, 611, 16, 3000, 2)]
    generate(engine, mixed, max_tokens=40)
    generate(engine, [mixed[1] + [7], [*mixed[5][:1400], 9, 9], mixed[10] + [3, 4, 5]], max_tokens=5)
    assert engine.stats().hits > 0
    generate(engine, [prompt_of(300, 7), prompt_of(20, 8)], max_tokens=3, prompt_logprobs=2, logprobs=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["paged", "ragged"])
@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4, 8, 16, 24)])
def test_nothing_is_compiled_once_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, layout: PrefillLayout, graph_sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(compressor, "_LOGITS_BYTES", 4 * 75 * 1000)  # slices begin anywhere
    options = {"max_requests": 24, "max_step_tokens": 600, "graph_sizes": graph_sizes}
    with made_engine(folder, device, layout, monkeypatch, **options) as (engine, compiler):
        serve_all_kinds(engine)
    assert len(compiler.known) > 60
    assert compiler.since == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["paged", "ragged"])
def test_what_is_built_before_the_warm_up_is_what_it_launches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, layout: PrefillLayout
) -> None:
    """One layer of each kind, on memory of zeros, has the launches of all layers that run."""
    target = DEVICES[device][0]
    built: list[tuple[Any, ...]] = []
    before: set[tuple[Any, ...]] = set()

    def build(compiler: Compiler, run: Callable[[], None]) -> None:
        before.update(compiler.known)
        built.extend(compile_key(launch, target) for launch in distinct_launches(run, target))

    options = {"max_requests": 24, "max_step_tokens": 600, "graph_sizes": (1, 2, 4, 8, 16, 24), "build": build}
    with made_engine(folder, device, layout, monkeypatch, **options) as (_, compiler):
        assert compiler.since == []
    assert len(built) == len(set(built)) > 50
    assert set(built) - before == compiler.known - before


@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4, 8, 16, 24)])
def test_libraries_compile_nothing_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch, graph_sizes: tuple[int, ...]
) -> None:
    options = {"max_requests": 24, "max_step_tokens": 600, "graph_sizes": graph_sizes, "with_libraries": True}
    with made_engine(folder, "sm_90", "ragged", monkeypatch, **options) as (engine, compiler):
        serve_all_kinds(engine)
    libraries = {key[0] for key in compiler.known if not str(key[0]).startswith("halocline.")}
    assert libraries == {
        "fp8_gemm_nt", "fp8_einsum", "metadata", "fp8_paged_mqa_logits", "fp8_mqa_logits", "tf32_hc_prenorm_gemm",
        "matmul_ogs",
    }  # fmt: skip
    assert {key[2] for key in compiler.known if key[0] == "fp8_gemm_nt"} == {16, 32, 64, 128, 192, 256, 512}
    assert compiler.since == []


def test_calls_noted_beforehand_are_what_libraries_compile_for_the_warm_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made on zeros by another process, they have a library compile what the steps of a warm-up would."""
    target = DEVICES["sm_90"][0]
    built, before = Compiler(target), set[tuple[Any, ...]]()

    def build(compiler: Compiler, run: Callable[[], None]) -> None:
        before.update(compiler.known)
        library: Any = sys.modules["deep_gemm"]
        library.compiler = built
        with noting({"deep_gemm", "flashinfer", "sgl_kernel"}) as calls:
            launches = distinct_launches(run, target)
        assert built.known == set()
        for call in calls.values():
            make(call, torch.device("cpu"))
        for launch in launches:
            built.note(compile_key(launch, target))
        library.compiler = compiler

    options = {"max_requests": 24, "max_step_tokens": 600, "graph_sizes": (1, 2, 4, 8, 16, 24), "build": build}
    with made_engine(folder, "sm_90", "ragged", monkeypatch, with_libraries=True, **options) as (_, compiler):
        assert compiler.since == []
    of_experts = {key for key in compiler.known if key[0] == "matmul_ogs"}  # Triton's, were they not stood in for here
    assert built.known - before == compiler.known - before - of_experts
    assert {key[0] for key in built.known if isinstance(key[0], str) and "." not in key[0]} == {
        "fp8_gemm_nt", "fp8_einsum", "metadata", "fp8_paged_mqa_logits", "fp8_mqa_logits", "tf32_hc_prenorm_gemm",
    }  # fmt: skip


@pytest.mark.parametrize("most", [128, 600, 2048, 3000, 8192])
@pytest.mark.parametrize("num_experts", [256, 384])
def test_sizes_meet_every_choice_at_the_released_sizes(most: int, num_experts: int) -> None:
    """What follows from the number of tokens alone, and would be slow to run at the width of the released models."""

    def choices(tokens: int) -> Iterator[tuple[Any, ...]]:
        pairs = 6 * tokens
        mean = max(1, pairs // num_experts)
        tile = 128 if mean > 64 else max(16, min(1 << (2 * mean - 1).bit_length(), 64))
        yield "blocks", tile, moe_triton_kernels._num_blocks(num_experts, pairs, tile) % 16 == 0
        yield "stages", tile, mean > moe_triton_kernels._MANY_ROWS
        yield "step", pairs_of_a_step(pairs)
        for _, facts in DEVICES.values():
            for size in (1, 2, 4):
                yield "tiles", size, gemm_tiles(facts, num_rows=tokens, element_bytes=size, batch_invariant=False)
                rows = -(-pairs // num_experts)
                yield "experts", size, expert_tiles(facts, mean_rows=rows, element_bytes=size, batch_invariant=False)
            for splits in (32, MANY_SPLITS):
                lanes = 4 * 4096
                yield num_mix_splits(facts, num_tokens=tokens, lanes=lanes, batch_invariant=False, most=splits), splits
            for heads in (64, 128):
                found = attention_tiles(facts, heads, torch.bfloat16)
                yield (
                    num_attention_splits(
                        facts, found, num_tokens=tokens, num_heads=heads, num_entries=640, batch_invariant=False
                    ),
                    heads,
                    found,
                )

    met = {choice for size in warm_up_tokens(most, compiles=True) for choice in choices(size)}
    assert {choice for tokens in range(1, most + 1) for choice in choices(tokens)} <= met
