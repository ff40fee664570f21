"""Kernels of a session's workbench: right, wrong and broken ones are told apart, those of several ranks left out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halocline.backends_reference.manifest import MANIFEST as REFERENCE
from halocline.benchmarks import gpu_parity, gpu_ready
from halocline.benchmarks.gpu_rows import read_rows
from halocline.hal.backend import Manifest
from halocline.hal.inventory import Inventory
from halocline.hal.offline import Workbench
from halocline.hal.op import KernelSpec
from halocline.hal.profiles import profile

KERNELS = '''
"""Kernels of the CPU that a test tries: one is right, one is not, one ends."""
from halocline.backends_reference.norm import rms_norm_reference
from halocline.hal.op import implements
from halocline.hal.ops.norm import rms_norm
@implements(rms_norm)
def right(x_TD, weight_D, *, eps):
    return rms_norm_reference(x_TD, weight_D, eps=eps)
@implements(rms_norm)
def wrong(x_TD, weight_D, *, eps):
    return rms_norm_reference(x_TD, weight_D, eps=eps) * 1.5
@implements(rms_norm)
def broken(x_TD, weight_D, *, eps):
    raise RuntimeError("no such shape")
'''


@pytest.fixture
def fake_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workbench of the CPU with three kernels of one op, and one for groups of ranks."""
    (tmp_path / "kernels_of_a_test.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("kernels_of_a_test", None)
    (reference,) = (spec for spec in REFERENCE.specs if spec.op == "norm.rms_norm")
    specs = tuple(
        KernelSpec(
            op="norm.rms_norm", name=name, target=f"kernels_of_a_test:{function}", vendor="cpu",
            formats=reference.formats, semantics=reference.semantics, rank=rank,
            traits={"world_size": (2, 4)} if name == "ranks" else {},
        )
        for rank, (name, function) in enumerate(
            {"triton": "right", "wrong": "wrong", "broken": "broken", "ranks": "right"}.items(), 1
        )
    )  # fmt: skip
    own = Manifest(name="tested", vendor="cpu", specs=specs)
    bench = Workbench(manifests=(REFERENCE, own), device=profile("cpu").device, inventory=Inventory.of(()))
    monkeypatch.setattr(gpu_parity, "workbench", lambda: bench)
    monkeypatch.setattr(gpu_ready, "workbench", lambda: bench)


def named(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["name"] == name]


@pytest.mark.usefixtures("fake_bench")
def test_right_wrong_and_broken_kernels_are_told_apart(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("cases", "--ops", "norm")
    found = {row["params"]["kernel"]: row["value"] for row in named(rows, "parity.kernel")}
    assert found["triton"]["within"] == found["triton"]["cases"] > 3
    assert found["wrong"]["within"] < found["wrong"]["cases"]
    assert found["wrong"]["share_of_tolerance"] > 1
    assert found["broken"]["within"] == 0
    faults = {row["params"]["kernel"]: row["value"] for row in named(rows, "parity.fault")}
    assert "norm 0.5" in faults["wrong"]
    assert faults["broken"] == "RuntimeError: no such shape"


@pytest.mark.usefixtures("fake_bench")
def test_a_kernel_of_several_ranks_is_named_and_not_tried(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("cases", "--ops", "norm")
    assert [row["params"] for row in named(rows, "parity.left_out")] == [{"op": "norm.rms_norm", "kernel": "ranks"}]
    assert "ranks" not in {row["params"]["kernel"] for row in named(rows, "parity.kernel")}
    rows = run("cases", "--ops", "norm", "--kernels", "triton")
    assert len(named(rows, "parity.left_out")) == 1, "the first run's: another kernel was asked for"


@pytest.mark.usefixtures("fake_bench")
def test_overrides_ask_for_no_kernel_of_several_ranks(
    run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations are stood in for by the flags that they get."""
    asked: list[tuple[str, ...]] = []

    def short(_options: Any, flags: tuple[str, ...]) -> list[list[int]]:
        asked.append(flags)
        return [[1]]

    class Loaded:
        table = SimpleNamespace(rows=lambda: [{"op": "norm.rms_norm"}])

    monkeypatch.setattr(gpu_ready, "_short", short)
    monkeypatch.setattr(gpu_ready, "load_model", lambda *_, **__: Loaded())
    rows = run("overrides", "--ops", "norm")
    assert [row["params"]["kernel"] for row in named(rows, "override.left_out")] == ["ranks"]
    wanted = {f"norm.rms_norm={name}" for name in ("triton", "wrong", "broken", "reference")}
    assert {flag for flags in asked for flag in flags} == wanted


@pytest.mark.usefixtures("fake_bench")
def test_a_part_that_is_ended_early_says_what_it_has_found(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_all, count = gpu_parity._judge_all, 0

    def ending(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            signal.raise_signal(signal.SIGTERM)
        judge_all(*arguments)

    monkeypatch.setattr(gpu_parity, "_judge_all", ending)
    with pytest.raises(SystemExit):
        run("cases", "--ops", "norm", "--kernels", "triton")
    (row,) = named(read_rows(tmp_path / "out" / "rows.jsonl"), "parity.kernel")
    assert (row["value"]["cases"], row["value"]["within"], row["value"]["complete"]) == (3, 3, False)


@pytest.mark.usefixtures("fake_bench")
def test_kernels_are_chosen_by_name(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("cases", "--ops", "norm.rms_norm", "--kernels", "triton")
    assert [row["params"]["kernel"] for row in named(rows, "parity.kernel")] == ["triton"]


@pytest.mark.usefixtures("fake_bench")
def test_every_kernel_is_timed_on_the_same_inputs(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("speed", "--ops", "norm")
    cases = {name: set() for name in ("triton", "wrong")}
    for row in named(rows, "speed.kernel"):
        assert row["value"] > 0
        cases[row["params"]["kernel"]].add((row["params"]["case"], row["params"]["dtype"]))
    assert cases["triton"] == cases["wrong"] != set()
    assert [row["params"]["kernel"] for row in rows if row["unit"] == "error"] == ["broken"] * len(cases["triton"])


@pytest.mark.usefixtures("fake_bench")
def test_portable_kernels_run_on_their_smallest_inputs(run: Callable[..., list[dict[str, Any]]]) -> None:
    (row,) = named(run("smallest", "--ops", "norm"), "sanitizer.calls")
    assert row["value"] >= 2
