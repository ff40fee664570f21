"""Parts of a GPU session run on a CPU at tiny sizes: the code is the same, kernels and graphs are stood in for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halocline.backends_reference.kernels import reference_kernels
from halocline.benchmarks import gpu_parts, gpu_tools, gpu_width
from halocline.benchmarks.gpu_criteria import verdicts
from halocline.benchmarks.gpu_prompts import load_prompts, write_prompts
from halocline.benchmarks.gpu_rows import read_rows
from halocline.benchmarks.gpu_width import StoredExperts, few_experts_at_a_time
from halocline.engine.agreement import EarlierAnswer
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops import Ops
from halocline.hal.ops.moe import Routing
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random checkpoint."""
    make_checkpoint(tmp_path / "model", preset("tiny").without_draft(), seed=1)
    return tmp_path / "model"


def named(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["name"] == name]


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_and_prefills_are_held_against_their_roofs(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("decode", "--shapes", "2", "prefill", "--trace")
    (step,) = named(rows, "decode.step")
    assert step["share"] == pytest.approx(step["roof"] / step["value"], abs=1e-4)
    assert named(rows, "decode.finite")[0]["value"] is True
    assert len(named(rows, "decode.experts")[0]["value"]) == 3
    assert 0 < len(named(rows, "decode.trace")[0]["value"]) <= 25
    assert named(rows, "machine.copy")[0]["value"] > 0
    assert named(rows, "prefill.rate")[0]["value"] > 0
    assert not [row for row in rows if row["unit"] == "error"]


def test_warming_times_nothing(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("decode", "--warm", "--shapes", "1")
    assert {row["name"] for row in rows} >= {"decode.seconds", "decode.weights"}
    assert not named(rows, "decode.step")


@pytest.mark.slow
def test_replays_equal_eager_steps(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("graphs")
    what = [row["params"]["what"] for row in named(rows, "graph.apart")]
    assert len(what) == len(set(what)) == 6
    assert [row["value"] for row in named(rows, "graph.apart")] == [0] * 6
    assert named(rows, "graph.neighbour")[0]["value"] is True


@pytest.mark.slow
def test_layers_agree_with_the_reference_position_by_position(run: Callable[..., list[dict[str, Any]]]) -> None:
    """On a CPU the kernels are the reference's: nothing is apart but what is made so."""
    rows = run("width")
    assert [row for row in rows if row["unit"] == "error"] == []
    found = {
        tuple(row["params"][key] for key in ("kernels", "choices", "against", "positions")): row["value"]
        for row in named(rows, "width.cosine")
    }
    assert len(found) == 16
    for positions in ("prefill", "decode"):
        for choices in ("reference", "own"):
            assert found["default", choices, "served", positions]["least"] == 1.0
            cost = found["reference", choices, "float32", positions]
            assert found["default", choices, "float32", positions] == cost
            for value in (cost, found["reference, nudged", choices, "served", positions]):
                assert 0.5 < value["least"] < 1.0  # low-bit rounding costs something
                assert value["count"] == 4
    halves = named(rows, "width.part")
    assert len({tuple(row["params"].values()) for row in halves}) == len(halves) == 16
    assert {(row["value"]["least"], row["value"]["error"]) for row in halves} == {(1.0, 0.0)}
    shares = {
        (row["params"]["kernels"], row["params"]["choices"]): row["value"] for row in named(rows, "width.choices")
    }
    assert shares["default", "own"] == {"experts": 1.0, "entries": 1.0}
    assert 0.5 < shares["reference, nudged", "own"]["experts"] < 1.0


@pytest.mark.slow
def test_a_wrong_kernel_is_noticed_at_full_width(
    run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expert kernels under test, which are bound after the reference's, lose the first expert of each token."""
    made, experts = 0, gpu_width.few_experts_at_a_time

    def losing(ops: Ops) -> Ops:
        nonlocal made
        made += 1
        ops = experts(ops)
        if made > 8:  # two references of four layers came before
            right = ops.moe.experts

            def wrong(x_TD: torch.Tensor, routing: Routing, *rest: Any, **options: Any) -> torch.Tensor:
                ids_TK = routing.ids_TK.clone()
                ids_TK[:, 0] = -1
                return right(x_TD, Routing(ids_TK, routing.weights_TK), *rest, **options)

            ops.moe.experts = wrong  # type: ignore[assignment]
        return ops

    monkeypatch.setattr(gpu_width, "few_experts_at_a_time", losing)
    rows = run("width")
    least = {
        tuple(row["params"][key] for key in ("part", "layer", "positions")): row["value"]
        for row in named(rows, "width.part")
    }
    for (part, *_), value in least.items():
        assert (value["least"] == 1.0) is (part == "attention")
        assert (value["error"] > 0.1) is (part == "experts")
    (verdict,) = (one for one in verdicts(rows) if one.line.startswith("each half"))
    assert verdict.passed is False


@pytest.mark.slow
def test_both_implementations_are_timed_in_turn(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("peer")
    ours, theirs, factor = (named(rows, f"peer.{name}")[0] for name in ("ours", "theirs", "factor"))
    assert factor["value"] == pytest.approx(theirs["value"] / ours["value"], rel=0.01)
    assert theirs["params"]["finite"] is True


@pytest.mark.slow
def test_nothing_is_compiled_or_imported_once_ready(run: Callable[..., list[dict[str, Any]]], folder: Path) -> None:
    rows = run("ready", "--model", str(folder))
    assert [named(rows, f"ready.{what}")[0]["value"] for what in ("kernels", "modules", "programs")] == [0, 0, 0]


@pytest.mark.slow
def test_a_model_made_on_the_device_loads_and_generates(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("made")
    assert named(rows, "made.generated")[0]["value"] == [4, 4]
    assert "drawn on" in named(rows, "made.seconds_in_all")[0]["params"]["said"]


@pytest.mark.slow
def test_a_start_says_where_its_time_goes(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("start", "--caches", "warm", "--layers", "2")
    (where,), (first,) = named(rows, "start.where"), named(rows, "start.first_token")
    assert sum(where["value"].values()) == pytest.approx(first["value"], abs=0.01)
    assert list(where["value"])[:2] == ["start of Python", "import torch"]
    assert where["params"]["layers"] == 2


def test_experts_a_few_at_a_time_give_what_all_of_them_give() -> None:
    """More experts are chosen than are expanded together, and some choices are of other ranks (-1)."""
    generator = torch.Generator().manual_seed(3)

    def stack(*shape: int) -> Weight:
        data = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return Weight(data=data, format=WeightFormat.FLOAT32, shape=shape)

    gate_up, down = stack(40, 16, 8), stack(40, 8, 8)
    ids_TK = torch.randint(-1, 40, (50, 3), generator=generator, dtype=torch.int32)
    routing = Routing(ids_TK, torch.rand(50, 3, generator=generator))
    x_TD = torch.randn(50, 8, generator=generator)
    whole, few = Ops(reference_kernels()), few_experts_at_a_time(Ops(reference_kernels()))
    expected = whole.moe.experts(x_TD, routing, whole.moe.prepare_experts(gate_up, down, activation="none"), limit=10.0)
    stored = few.moe.prepare_experts(gate_up, down, activation="none")
    assert isinstance(stored, StoredExperts)
    torch.testing.assert_close(few.moe.experts(x_TD, routing, stored, limit=10.0), expected, rtol=1e-5, atol=1e-6)


# ---- the graded model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_are_marked_and_held_against_the_reference(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Two of three known answers are what the model writes; the third is another one."""
    graded = ROOT / "graded"
    known = {
        "sums-1": EarlierAnswer("3+1=4, 1=1</think>14", True),
        "sums-2": EarlierAnswer("something else", False),
    }
    path = tmp_path / "prompts.json"
    assert write_prompts(graded, "quick", known, path) == 2
    suite, items = load_prompts(path)
    kept = [item for item in items if item["name"] in known]
    path.write_text(json.dumps({"suite": suite, "items": kept}))
    rows = run("graded", "--prompts", str(path), "--model", str(graded), "--batches", "2", "1")
    for row in named(rows, "graded.agreement"):
        assert row["value"] == {"same": 0.5, "score": 1.0, "reference_score": 0.5, "p": 1.0}
        assert row["params"]["apart"] == ["sums-2"]
    assert [row["params"]["batch"] for row in named(rows, "graded.score")] == [2, 1]


# ---- other programs -------------------------------------------------------------------------------------------------


def test_errors_of_all_processes_are_counted() -> None:
    text = "========= ERROR SUMMARY: 2 errors\n========= RACECHECK SUMMARY: 1 hazard displayed\n"
    assert gpu_tools.errors_found(text) == 3
    assert gpu_tools.errors_found("========= ERROR SUMMARY: 0 errors") == 0
    assert gpu_tools.errors_found("Device not supported") is None


@pytest.mark.parametrize(("said", "status", "unit"), [("0", 0, "errors"), ("4", 0, "errors"), ("", 1, "error")])
def test_a_checker_that_says_nothing_or_fails_is_an_error(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    said: str, status: int, unit: str,
) -> None:  # fmt: skip
    program = tmp_path / "compute-sanitizer"
    summary = f"========= ERROR SUMMARY: {said} errors" if said else "Device not supported"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "{summary}"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows = run("sanitizer", "--ops", "norm")
    (row,) = [row for row in rows if row["name"] in {"sanitizer.errors", "sanitizer"}]
    assert row["unit"] == unit
    if said:
        assert row["value"] == int(said)
    asked = (tmp_path / "asked").read_text()
    assert "--tool memcheck" in asked
    assert "gpu_parts smallest" in asked
    assert "--ops norm" in asked


def test_what_runs_under_the_checker_adds_its_rows_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for the checker drops its own options and runs the rest, as the real one does."""
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\nshift 6\n"$@"\nstatus=$?\necho "ERROR SUMMARY: 0 errors"\nexit $status\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows_file = tmp_path / "rows" / "rows.jsonl"
    words = ["sanitizer", "--ops", "norm", "--out", str(tmp_path / "out"), "--rows", str(rows_file), "--label", "x"]
    assert gpu_parts.main([*words, "--commit", "c"]) == 0
    rows = read_rows(rows_file)
    assert {row["name"] for row in rows} >= {"sanitizer.calls", "sanitizer.errors"}
    assert {(row["commit"], row["part"]) for row in rows} == {("c", "x")}


def test_counts_of_tests_come_from_the_report_of_pytest(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    suite = tmp_path / "test_of_a_device.py"
    suite.write_text(
        "import pytest\n"
        "@pytest.mark.cuda\ndef test_a(): pass\n"
        "@pytest.mark.cuda\ndef test_b(): assert False\n"
        "def test_c(): assert False\n"
    )
    (row,) = named(run("tests", "--tests", str(suite)), "tests.counts")
    assert row["value"] == {"executed": 2, "failed": 1, "skipped": 0}
    assert [name.rpartition("::")[2] for name in row["params"]["failed"]] == ["test_b"]


def test_without_a_wheel_the_part_says_what_to_do(run: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = run("wheel", "--wheels", str(tmp_path))
    assert "./dev wheel builds it" in named(rows, "wheel")[0]["value"]
