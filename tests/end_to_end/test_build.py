"""Kernels are compiled side by side, from records of launches that did not happen, and launches find them.

The compilers need no device: what stands in for Triton's driver names one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from halocline.backends_cuda.runtime import RUNTIME as CUDA
from halocline.backends_triton.runtime import RUNTIME as SHARED
from halocline.engine.warm_up import kernel_builder
from halocline.hal.backend import Backend
from halocline.hal.formats import recipe
from halocline.hal.profiles import profile
from halocline.hal.settings import Settings
from halocline.hal.startup import choose_kernels
from halocline.kernels_portable import build
from halocline.kernels_portable.aot import compile_key, recorded_launches
from halocline.kernels_portable.build import build_launches, distinct_launches
from halocline.models.deepseek_v4.presets import VENDOR_TINY
from halocline.models.deepseek_v4.requests import kernel_requests

SM_90 = GPUTarget("cuda", 90, 32)
GFX942 = GPUTarget("hip", "gfx942", 64)


@triton.jit(do_not_specialize=["count"])
def _scale_kernel(x_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):  # noqa: N803
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < count, other=0.0)
    tl.store(out_ptr + lanes, x * factor, mask=lanes < count)


@triton.jit
def _broken_kernel(x_ptr, BLOCK: tl.constexpr):  # noqa: N803
    tl.static_assert(BLOCK > 1024, "this block is too small")
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


class Driver:
    """Names a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return SM_90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Shown:
    """What was shown of the progress."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.done: list[int] = []

    @contextmanager
    def __call__(self, total: int) -> Iterator[Callable[[int], None]]:
        self.totals.append(total)
        yield self.done.append


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Names of kernels in the order in which they are missed, with an empty cache and a device of which only the name
    is there."""
    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> bool:
        names.append(fn.name)
        return False

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    yield names
    for kernel in (_scale_kernel, _broken_kernel):
        kernel.device_caches.clear()


def scale(sizes: list[int], first: int = 0) -> Callable[[], None]:
    """Launches over slices of one vector; blocks of 64 or 128."""

    def run() -> None:
        x, out = torch.zeros(1024), torch.empty(1024)
        for size in sizes:
            block = 64 if size <= 64 else 128
            _scale_kernel[(1,)](x[first:], out, size, 1.5, num_stages=2, BLOCK=block, num_warps=1)

    return run


def test_each_kernel_is_recorded_once_and_without_its_memory() -> None:
    launches = distinct_launches(scale([1, 16, 17, 64, 65, 128]), SM_90)
    assert [launch.arguments["BLOCK"] for launch in launches] == [64, 128]
    assert [launch.arguments["count"] for launch in launches] == [1, 65]
    assert not any(isinstance(value, torch.Tensor) for launch in launches for value in launch.arguments.values())


@pytest.mark.parametrize("target", [SM_90, GFX942])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_a_record_is_compiled_like_its_launch(target: GPUTarget, first: int) -> None:
    run = scale([16, 100], first)
    expected = [compile_key(launch, target) for launch in recorded_launches(run)]
    assert [compile_key(launch, target) for launch in distinct_launches(run, target)] == expected
    aligned = compile_key(distinct_launches(scale([16]), target)[0], target)
    assert (expected[0] == aligned) == (first % 4 == 0)


def test_what_kernels_would_write_is_zero() -> None:
    found: list[torch.Tensor] = []
    allocate = torch.empty

    def run() -> None:
        x = torch.full((3,), 7)
        found.extend((torch.empty(4), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2, 2), (2, 1)), x))

    torch.full((1 << 16,), 9.0)  # freed memory that is taken again
    assert distinct_launches(run, SM_90) == []
    assert [tensor.count_nonzero().item() for tensor in found] == [0, 0, 0, 0, 3]
    assert torch.empty is allocate


def test_launches_find_what_was_built(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_QUIET_SECONDS", 0.0)
    shown, run = Shown(), scale([1, 17, 64, 65, 128])
    launches = distinct_launches(run, SM_90)
    begun: list[None] = []
    build_launches(launches, workers=2, progress=shown, begin_thread=lambda: begun.append(None))
    assert (shown.totals, shown.done, len(begun)) == ([2], [1, 2], 2)
    assert compiled == ["_scale_kernel"] * 2

    kernels: list[Any] = []
    original = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *arguments: Any, warmup: bool, **options: Any) -> None:
        kernels.append(original(kernel, *arguments, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    run()
    assert len(kernels) == 5
    assert all("ptx" in kernel.asm for kernel in kernels)
    assert len(compiled) == 2


def test_a_start_that_finds_everything_is_silent(compiled: list[str]) -> None:
    shown, launches = Shown(), distinct_launches(scale([64]), SM_90)
    build_launches(launches, workers=4, progress=Shown())
    _scale_kernel.device_caches.clear()  # as in another process, with the same cache folder
    build_launches(launches, workers=4, progress=shown)
    build_launches([], workers=4, progress=shown)
    assert (shown.totals, len(compiled)) == ([], 2)


def test_a_kernel_that_does_not_compile_is_named_once(compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        x = torch.zeros(64)
        for block in (16, 32):
            _broken_kernel[(1,)](x, BLOCK=block)
        scale([64])()

    caplog.set_level(logging.INFO, logger="halocline")
    build_launches(distinct_launches(run, SM_90), workers=2, progress=Shown())
    (record,) = (record for record in caplog.records if record.name == build.__name__)
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("the kernel broken cannot be compiled: ")
    assert "this block is too small" in record.getMessage()
    assert sorted(compiled) == ["_broken_kernel", "_broken_kernel", "_scale_kernel"]
    with pytest.raises(triton.CompilationError, match="this block is too small"):
        _broken_kernel.run(torch.zeros(64), BLOCK=16, grid=(1,), warmup=True)


def test_a_step_that_needs_true_numbers_is_left_to_the_first_launch(
    compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        scale([64])()
        raise IndexError("what a kernel would have written")

    caplog.set_level(logging.DEBUG, logger="halocline")
    SHARED.build(run, libraries=["triton"], workers=1, progress=Shown())
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are compiled when first launched: IndexError: what a kernel would have written"
    ]
    assert compiled == []
    assert len(recorded_launches(scale([64]))) == 1  # launches are launches again


@pytest.mark.parametrize(
    ("runtime", "flags", "expected"),
    [
        (SHARED, ("*=triton",), True),
        (SHARED, (), False),
        (SHARED, ("*=triton", "gemm.linear=deep_gemm"), False),
        (CUDA, ("*=triton",), True),
        (CUDA, (), True),
        (CUDA, ("*=triton", "gemm.linear=deep_gemm"), True),
        (CUDA, ("indexer.logits=tilelang",), False),
    ],
)
def test_only_kernels_whose_launches_can_be_foreseen_are_built(
    runtime: Backend, flags: tuple[str, ...], expected: bool
) -> None:
    hopper = profile("sm_90")
    table = choose_kernels(
        lambda device, layout: kernel_requests(
            VENDOR_TINY.without_draft(), recipe("served"), prefill_layout=layout, cache_dialect=device.fp8_dialect
        ),
        settings=Settings.read({}),
        flags=flags,
        device=hopper.device,
        inventory=hopper.inventory,
    )
    assert (kernel_builder(table, runtime) is not None) == expected
    assert kernel_builder(table, None) is None
