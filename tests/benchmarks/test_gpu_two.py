"""Parts of two ranks on a CPU at tiny sizes: processes, launcher and exchanges are real, kernels are stood in for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halocline.benchmarks import gpu_models
from halocline.benchmarks.gpu_criteria import verdicts
from halocline.benchmarks.gpu_ranks import MODES, _without_modes
from halocline.benchmarks.gpu_results import shared_facts
from halocline.benchmarks.gpu_rows import read_rows
from halocline.benchmarks.gpu_server import family_of
from halocline.benchmarks.gpu_tables import tables
from halocline.benchmarks.roofline_ranks import best_step, rank_step
from halocline.models.deepseek_v4.presets import FLASH

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 100.0


def run(out: Path, *words: str, status: int = 0) -> list[dict[str, Any]]:
    """Runs a part as a session does, in a process of its own, and gives its rows."""
    command = [sys.executable, "-m", "halocline.benchmarks", "gpu_parts", *words, "--tiny", "--out", str(out)]
    done = subprocess.run(
        [*command, "--commit", "c", "--model", str(ROOT / "graded")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return read_rows(out / "rows.jsonl")


def named(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["name"] == name]


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_exchanges_and_a_model_are_tried_in_every_kind_of_mode(tmp_path: Path) -> None:
    rows = run(tmp_path, "two_smoke", "--modes", "tp-ep", "dp-sent")
    found = named(rows, "two_smoke.exchange")
    ops = {row["params"]["op"].partition(".")[2]: row["value"] for row in found}
    assert ops.keys() == {"all_reduce", "all_gather", "broadcast", "all_to_all"}
    assert ops["all_gather"] == {"eager": [[True, True]] * 2, "replayed": [[True, True]] * 2}
    assert ops["all_to_all"]["replayed"] == [[], []], "its counts are the host's"
    assert [row["params"]["mode"] for row in named(rows, "two_smoke.replay")] == ["tp-ep"]
    assert [row["params"]["mode"] for row in named(rows, "two_smoke.ranks.seconds")] == ["tp-ep", "dp-sent"]
    line = next(one for one in verdicts(rows) if one.line.startswith("two GPUs: exchanges"))
    assert line.passed, line.said
    assert "all_reduce=reference" in line.said


def test_each_rank_has_its_share_of_the_batch(tmp_path: Path) -> None:
    rows = run(tmp_path, "two_decode", "--modes", "dp", "tp", "--shapes", "1", "2")
    steps = {(row["params"]["mode"], row["params"]["batch"]) for row in named(rows, "two_decode.step")}
    assert steps == {("dp", 2), ("tp", 1), ("tp", 2)}, "a rank without a row is no share of a machine"
    assert all(row["value"] for row in named(rows, "two_decode.finite"))
    experts = {(r["params"]["mode"], r["params"]["batch"]): r["value"] for r in named(rows, "two_decode.experts")}
    assert max(experts["dp", 2]) > 2, "both ranks' rows meet experts, and they are not the same rows"
    assert "Two GPUs: decode steps of the whole machine" in tables(rows)


def test_exchanges_are_timed_by_size(tmp_path: Path) -> None:
    rows = named(run(tmp_path, "two_collectives"), "two.collective")
    assert {row["params"]["bytes"] for row in rows} == {8 << 10, 256 << 10, 1 << 20}
    assert {row["params"]["op"] for row in rows if not row["params"]["graph"]} == {"collective.all_to_all"}
    assert all(row["value"] > 0 for row in rows)


def test_the_graded_model_answers_on_two_ranks(tmp_path: Path) -> None:
    items = [
        {"name": name, "prompt": [0, 5, 6], "answer": {"output": "", "is_right": False}} for name in _names("check")
    ]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"suite": "check", "items": items}))
    rows = run(tmp_path, "two_graded", "--modes", "tp", "dp", "--prompts", str(prompts), "--items", "2")
    (refused,) = named(rows, "two_graded.refused")
    assert refused["params"]["mode"] == "tp"
    assert "cannot be split" in refused["value"], "half of an expert's width is half a block"
    (agreement,) = named(rows, "two_graded.agreement")
    assert agreement["params"]["mode"] == "dp"
    assert agreement["params"]["compared"] == 2


def _names(suite: str) -> list[str]:
    lines = (ROOT / "graded" / "suites" / f"{suite}.jsonl").read_text().splitlines()
    return [json.loads(line)["name"] for line in lines[:2]]


def test_what_fails_in_a_rank_is_a_row_and_ends_both(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere.json")
    rows = run(tmp_path, "two_graded", "--modes", "dp", "--prompts", nowhere, status=1)
    assert any("FileNotFoundError" in row["value"] for row in named(rows, "two_graded.rank"))
    (row,) = named(rows, "two_graded.ranks")
    assert (row["unit"], row["params"]) == ("error", {"mode": "dp"})


@pytest.mark.slow
def test_a_model_is_made_generated_from_and_served(tmp_path: Path) -> None:
    run(tmp_path, "two_make")
    run(tmp_path, "two_generate")
    rows = run(tmp_path, "two_serve")
    assert [row["params"]["layers"] for row in named(rows, "two_make.seconds_in_all")] == [5]
    (tokens,) = named(rows, "two_generate.tokens")
    assert tokens["value"] == tokens["params"]["asked"]
    (ended,) = named(rows, "two_serve.ended")
    assert ended["value"]["status"] == 0
    assert ended["params"]["left"] == []
    assert [row["params"]["at_once"] for row in named(rows, "two_serve.rate")] == [1, 8]
    assert (tmp_path / "halocline-two" / "config.json").is_file()
    assert "ready" in tables(rows)["Two GPUs: seconds of a server's start"]
    assert shared_facts(rows)["commit"] == "c"


@pytest.mark.slow
def test_a_server_on_one_device_answers_and_is_loaded(tmp_path: Path) -> None:
    rows = run(tmp_path, "serve")
    (made,), (ended,), (load,) = (named(rows, f"serve{what}") for what in ("_make.seconds_in_all", ".ended", ".load"))
    assert (made["params"]["layers"], ended["params"]["left"]) == (4, [])
    assert load["params"] == {"layers": 4, "input": 20, "output": 3, "at_once": 2}
    assert load["value"]["output_token_throughput"]["avg"] > 0
    assert "| 4 | 2 | 20 + 3 |" in tables(rows)["A server under load"]
    assert not list(tmp_path.glob("halocline-one*/"))


@pytest.mark.slow
def test_what_a_server_needs_is_compiled_by_serving_a_few_layers(tmp_path: Path) -> None:
    rows = run(tmp_path, "two_serve", "--warm")
    (ready,) = named(rows, "two_warm_serve.ready")
    assert ready["params"] == {"layers": 4}
    assert ready["value"] > 0
    assert not list(tmp_path.glob("halocline-two*/")), "the layers go, and the whole model is not touched"
    lines = {one.line: one.passed for one in verdicts(rows)}
    assert lines["two GPUs, whole depth: serve loads, answers, drains"] is None


# ---- what they are made of ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "milliseconds"),
    [(1, (2.92, 8.05, 20.4, 35.4)), (2, (1.99, 4.55, 10.8, 18.4)), (4, (1.50, 2.78, 5.90, 10.0))],
)
def test_the_roof_of_several_devices(world: int, milliseconds: tuple[float, ...]) -> None:
    """Figures of an independent model of the hardware."""
    for batch, expected in zip((1, 8, 32, 128), milliseconds, strict=True):
        found = best_step(FLASH, batch=batch, context=8192, world=world).serial * 1e3
        assert found == pytest.approx(expected, rel=5e-3)


def test_spread_requests_pay_off_where_attention_weighs() -> None:
    assert best_step(FLASH, batch=512, context=8192, world=2).mode == "dp"
    assert best_step(FLASH, batch=1, context=8192, world=2).mode == "tp", "one request cannot be spread"
    step = rank_step(FLASH, batch=1, context=8192, world=2, mode="tp")
    assert step.exchanges == pytest.approx(2 * 43 * 2.5e-6)


def test_modes_are_taken_out_of_a_command_line() -> None:
    assert _without_modes(["two_smoke", "--modes", "tp", "dp", "--tiny"]) == ["two_smoke", "--tiny"]
    assert _without_modes(["two_smoke", "--out", "o", "--modes"]) == ["two_smoke", "--out", "o"]
    assert {mode.sizes.world for mode in MODES.values()} == {2}


def test_writers_stand_still_while_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but three of a process's family; they go on when memory is there, and while it is not, now and then."""
    told: list[tuple[tuple[int, ...], str]] = []
    free = iter([0, 0, 0, 1 << 40])
    monkeypatch.setattr(gpu_models, "family_of", lambda _pid: [1, 2, 3, 4, 5])
    monkeypatch.setattr(gpu_models, "_tell", lambda pids, number: told.append((tuple(pids), number.name)))
    monkeypatch.setattr(gpu_models, "_free_memory", lambda: next(free, 1 << 40))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as process:
        still = gpu_models._write_as_memory_grows(process)
    assert told == [((4, 5), "SIGSTOP"), ((4, 5), "SIGCONT")]
    assert 0 < still < 0.5


def test_a_family_is_found_without_the_help_of_its_parent() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert family_of(process.pid) == [process.pid, child]
        subprocess.run(["kill", str(child)], check=True)
        process.wait()


def test_what_is_drawn_for_a_rank_has_the_shape_of_its_part() -> None:
    from halocline.hal.formats import Weight
    from halocline.models.deepseek_v4.device_weights import DeviceWeights
    from halocline.models.deepseek_v4.presets import VENDOR_TINY
    from halocline.models.deepseek_v4.weight_plan import plan_weights
    from halocline.models.parallel import Parallel, ParallelSizes
    from halocline.models.sharding import RankPart
    from halocline.models.weight_plan import Role

    config = VENDOR_TINY.without_draft()
    plan, found = plan_weights(config), list[dict[str, Any]]()
    for rank in range(2):
        parallel = Parallel(sizes=ParallelSizes(tp=2, ep=2), rank=rank)
        source, values = DeviceWeights(config, device="cpu", parallel=parallel), dict[str, Any]()
        for parameter in RankPart(plan=plan, parallel=parallel).local_plan.parameters:
            if parameter.shard.expert is None:
                is_matrix = parameter.role is Role.MATRIX
                value = source.matrix(parameter.stem) if is_matrix else source.tensor(parameter.name)
                assert tuple(value.shape) == parameter.shape, parameter.name
                values[parameter.name] = value.data if isinstance(value, Weight) else value
        stack = source.experts("layers.0.ffn.experts", ("w1", "w3"), config.n_routed_experts)
        assert stack.shape[0] == config.n_routed_experts // 2
        found.append(values)
    for name in ("layers.0.ffn.gate.weight", "norm.weight", "layers.2.attn.wkv.weight"):
        assert torch.equal(found[0][name].float(), found[1][name].float()), "what all hold is the same"
