"""Calls are noted, and made by other processes, with a package in place of a library that compiles."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from halocline.backends_cuda import indexer_deep_gemm, library_builds
from halocline.backends_cuda import runtime as cuda_runtime
from halocline.backends_cuda.library_builds import LibraryBuilds
from halocline.backends_cuda.make_calls import make
from halocline.backends_cuda.noted_calls import LibraryCall, noting
from halocline.hal.settings import Settings
from halocline.kernels_portable import build

CPU = torch.device("cpu")
# Each call leaves a file with what it was made with. Some end badly.
LIBRARY = """
import os
import pathlib
import torch

def _note(text):
    folder = pathlib.Path(__file__).parent.parent / "compiled"
    (folder / f"{text}.{os.getpid()}").touch()

def fp8_gemm_nt(a, b, d, disable_ue8m0_cast):
    assert disable_ue8m0_cast
    print("a compiler speaks")
    if len(d) == 7:
        raise ValueError("seven rows")
    if len(d) == 9:
        os._exit(3)
    zeros = not any(part.float().any() for part in (*a, *b))
    _note(f"gemm {len(d)} {tuple(b[0].shape)} {a[1].stride()} {zeros}")

def fp8_einsum(expr, a, b, d, recipe):
    _note(f"einsum {expr} {recipe}")

def get_num_sms():
    return 132

def tf32_hc_prenorm_gemm(*arguments, num_splits):
    _note(f"prenorm {num_splits}")

def get_paged_mqa_logits_metadata(lengths, page_rows, num_sms):
    _note(f"metadata {lengths.tolist()} {page_rows} {num_sms}")
    return torch.full((num_sms + 1, 2), 5, dtype=torch.int32)

def fp8_paged_mqa_logits(q, pages, weights, lengths, table, schedule, most, *, clean_logits):
    _note(f"logits {tuple(pages.shape)} {lengths.tolist()} {table.tolist()} {schedule.unique().tolist()} {most}")

def fp8_mqa_logits(*arguments, clean_logits):
    raise NotImplementedError
"""


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What the library has compiled, and how often; each process of its own."""
    (tmp_path / "site" / "deep_gemm").mkdir(parents=True)
    (tmp_path / "site" / "deep_gemm" / "__init__.py").write_text(LIBRARY)
    folder = tmp_path / "site" / "compiled"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    settings = Settings.read({"DG_JIT_CACHE_DIR": str(tmp_path / "cache")})
    monkeypatch.setattr(library_builds, "process_settings", lambda: settings)
    yield lambda: sorted(path.stem for path in folder.iterdir())
    sys.modules.pop("deep_gemm", None)


def product(rows: int, lanes: int = 256) -> None:
    """A product as the adapter asks for it."""
    import deep_gemm

    x = torch.ones(rows, 128).to(torch.float8_e4m3fn), torch.ones(2, rows).T
    weight = torch.ones(lanes, 128).to(torch.float8_e4m3fn), torch.ones(lanes // 128, 1)
    deep_gemm.fp8_gemm_nt(x, weight, torch.empty(rows, lanes, dtype=torch.bfloat16), disable_ue8m0_cast=True)


def calls_of(run: Callable[[], None]) -> list[LibraryCall]:
    with noting({"deep_gemm"}) as calls:
        run()
    return list(calls.values())


def finished(builds: LibraryBuilds) -> list[str]:
    """What went wrong with each call, in order."""
    with builds:
        return [str(future.exception() or "") for future in builds.pending]


def products(*rows: int) -> Callable[[], None]:
    return lambda: [product(count) for count in rows] and None


def test_a_call_is_noted_once_and_not_made(compiled: Callable[[], list[str]]) -> None:
    calls = calls_of(products(16, 16, 32))
    assert compiled() == []
    assert [call.arguments[2].shape for call in calls] == [(16, 256), (32, 256)]
    import deep_gemm

    make(calls[0], CPU)
    product(48)
    assert compiled() == ["gemm 16 (256, 128) (1, 16) True", "gemm 48 (256, 128) (1, 48) False"]
    with pytest.raises(ZeroDivisionError), noting({"deep_gemm"}):
        raise ZeroDivisionError
    assert deep_gemm.fp8_gemm_nt.__module__ == "deep_gemm"


def test_a_schedule_is_made_for_somebody_who_sees_a_key(compiled: Callable[[], list[str]]) -> None:
    import deep_gemm

    def run() -> None:
        found = deep_gemm.get_paged_mqa_logits_metadata(torch.zeros(2, 1, dtype=torch.int32), 64, 132)
        assert found.shape == (133, 2)

    (call,) = calls_of(run)
    make(call, CPU)
    assert compiled() == ["metadata [[1], [1]] 64 132"]


def test_logits_are_made_with_their_schedule_and_one_page(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule of zeros can hang the kernel, and the pages of a whole cache would not fit a second time."""
    import deep_gemm

    def run() -> None:
        q, pages = torch.zeros(2, 1, 64, 128), torch.zeros((9, 64, 1, 132), dtype=torch.uint8)
        lengths, table, schedule = (torch.zeros(shape, dtype=torch.int32) for shape in ((2, 1), (2, 3), (133, 2)))
        found = deep_gemm.fp8_paged_mqa_logits(
            q, pages, torch.zeros(2, 64), lengths, table, schedule, 150, clean_logits=False
        )
        assert found.shape == (2, 150)

    monkeypatch.setattr(indexer_deep_gemm, "deep_gemm", lambda: deep_gemm)
    (call,) = calls_of(run)
    make(call, CPU)
    zeros = [[0, 0, 0]] * 2
    assert compiled() == [f"logits (1, 64, 1, 132) [[1], [1]] {zeros} [5] 150", "metadata [[1], [1]] 64 132"]


def test_processes_make_each_call_once_for_good(compiled: Callable[[], list[str]], tmp_path: Path) -> None:
    calls = calls_of(products(16, 32, 64))
    builds = LibraryBuilds(calls, CPU, workers=4)
    assert set(builds.pending.values()) == {"deep_gemm.fp8_gemm_nt"}
    assert finished(builds) == ["", "", ""]
    assert compiled() == [f"gemm {rows} (256, 128) (1, {rows}) True" for rows in (16, 32, 64)]
    again = LibraryBuilds([*calls, *calls_of(products(128))], CPU, workers=4)
    assert len(again.pending) == 1
    assert finished(again) == [""]
    assert len(list((tmp_path / "cache" / "made").iterdir())) == 4
    assert len(compiled()) == 4


def test_what_fails_is_left_to_the_step_that_needs_it(compiled: Callable[[], list[str]], tmp_path: Path) -> None:
    calls = calls_of(products(7, 16, 9, 32, 64))
    problems = finished(LibraryBuilds(calls, CPU, workers=8))
    assert problems == ["ValueError: seven rows", "", "the process ended: EOFError", "", ""]
    assert len(list((tmp_path / "cache" / "made").iterdir())) == 3


def test_a_process_that_does_not_start_is_not_tried_for_ever(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(products(16, 32, 64))
    monkeypatch.setattr(library_builds.sys, "executable", "/bin/false")
    problems = finished(LibraryBuilds(calls, CPU, workers=2))
    assert [problem.partition(":")[0] for problem in problems] == [
        "the process ended",
        *["too many calls have failed"] * 2,
    ]


def test_a_process_that_says_nothing_is_ended(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_builds, "_START_SECONDS", 0.0)
    assert finished(LibraryBuilds(calls_of(products(16)), CPU, workers=2)) == ["no answer in 0 s"]


class Driver:
    """Names a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def _fill_kernel(out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    tl.store(out_ptr + tl.arange(0, BLOCK), 1.0)


def test_a_build_compiles_both_kinds(
    compiled: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    totals, missed = [], []

    @contextmanager
    def progress(total: int) -> Iterator[Callable[[int], None]]:
        totals.append(total)
        yield lambda done: None

    def run() -> None:
        products(7, 16)()
        _fill_kernel[(1,)](torch.zeros(64), BLOCK=64, num_warps=1)

    monkeypatch.setattr(cuda_runtime, "_device", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(build, "_QUIET_SECONDS", 0.0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **_: missed.append(fn.name))
    caplog.set_level(logging.DEBUG, logger="halocline")
    cuda_runtime.RUNTIME.build(run, libraries={"deep_gemm", "triton"}, workers=4, progress=progress)
    _fill_kernel.device_caches.clear()
    assert [name.partition(" (")[0] for name in compiled()] == ["gemm 16"]
    assert (totals, missed) == ([3], ["_fill_kernel"])
    told = [record.getMessage() for record in caplog.records if "compiled in" not in record.getMessage()]
    assert told == ["deep_gemm.fp8_gemm_nt: not compiled beforehand: ValueError: seven rows"]
