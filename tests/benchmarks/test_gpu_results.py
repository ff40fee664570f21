"""Verdicts follow from rows: each line passes, fails and knows when it was not run; tables show what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halocline.benchmarks import gpu_results
from halocline.benchmarks.gpu_criteria import CRITERIA, latest, verdicts
from halocline.benchmarks.gpu_tables import tables

ROOT = Path(__file__).resolve().parents[2]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results" / "h200"
FLASH: dict[str, Any] = {"kernels": "default", "model": "flash", "layers": 8}
GRADED: dict[str, Any] = {"graphs": True, "suite": "graded", "items": 326, "compared": 326, "apart": []}


def row(
    name: str, value: Any, unit: str = "x", *, share: float | None = None, roof: float | None = None, **params: Any
) -> dict[str, Any]:
    facts = {"device": "NVIDIA H200", "versions": {"python": "3.12.3"}, "commit": "c", "part": "p"}
    return {"name": name, "params": params, "value": value, "unit": unit, "roof": roof, "share": share, **facts}


def agreement(kernels: str, batch: int, score: float = 0.985, p: float = 0.5, same: float = 0.99) -> dict[str, Any]:
    value = {"same": same, "score": score, "reference_score": 0.988, "p": p}
    return row("graded.agreement", value, "share", kernels=kernels, batch=batch, **GRADED)


def parity(kernel: str, within: int = 3, op: str = "gemm.linear", *, complete: bool = True) -> dict[str, Any]:
    value = {"cases": 3, "within": within, "complete": complete, "norm": 1e-3, "share_of_tolerance": 0.5, "case": "a"}
    return row("parity.kernel", value, "cases", op=op, kernel=kernel)


def step(batch: int, share: float, layers: int = 8, kernels: str = "default") -> dict[str, Any]:
    params = {**FLASH, "kernels": kernels, "layers": layers, "batch": batch, "context": 8192}
    return row("decode.step", 1.0, "ms", share=share, roof=share, **params)


def cosine(
    against: str, mean: float = 0.9978, *, kernels: str = "default", choices: str = "reference", finite: bool = True
) -> dict[str, Any]:
    value = {"least": 0.995, "mean": mean, "same_argmax": 0.8, "count": 64, "finite": finite}
    params = {"kernels": kernels, "against": against, "choices": choices, "positions": "decode"}
    return row("width.cosine", value, "cosine", **params)


def half(least: float = 0.9991, error: float = 0.04, *, finite: bool = True) -> dict[str, Any]:
    value = {"least": least, "mean": 0.9999, "same_argmax": 1.0, "count": 64, "finite": finite, "error": error}
    return row("width.part", value, "cosine", kernels="default", layer=2, part="experts", positions="decode")


def full_width() -> list[dict[str, Any]]:
    """Kernels that are as far from the reference as it is from itself; with choices of their own, farther."""
    rows = [half(), row("width.choices", {"experts": 0.7, "entries": None}, "share", kernels="default", choices="own")]
    for against, norm in (("served", "reference, nudged"), ("float32", "reference")):
        rows += [cosine(against), cosine(against, 0.99, choices="own"), cosine(against, 0.998, kernels=norm)]
    return rows


def good() -> list[dict[str, Any]]:
    """Rows with which every line holds."""
    rows = [parity("triton"), parity("tilelang"), parity("deep_gemm")]
    rows += [agreement("default", 1), agreement("default", 32), agreement("portable", 1), agreement("portable", 32)]
    rows += [agreement("tilelang", 32), *full_width()]
    rows += [row("graph.apart", 0, "of 50", kernels="default", what="changing lengths")]
    rows += [row("graph.neighbour", True, "bool", kernels="default")]
    rows += [row("tests.counts", {"executed": 30, "failed": 0, "skipped": 0}, "tests", paths=["a"], failed=[])]
    for batch, share in ((1, 0.31), (8, 0.46), (32, 0.51), (128, 0.52)):
        rows += [step(batch, share), row("decode.finite", True, "bool", **FLASH, batch=batch, context=8192)]
    rows += [row("decode.experts", [44, 45], "experts", roof=44.2, **FLASH, batch=8, context=8192)]
    rows += [step(1, 0.3, layers=36), step(32, 0.5, layers=36)]
    rows += [row("prefill.rate", 50_000, "tokens/s", share=0.3, roof=181_600, **FLASH, tokens=8192)]
    rows += [row("peer.factor", 16.0, "x faster", layers=4)]
    rows += [row("decode.step", 2.0, "ms", share=0.4, roof=1.0, kernels="default", model="pro", layers=4, batch=1)]
    rows += [row("prefill.rate", 9_000, "tokens/s", share=0.3, roof=1, kernels="default", model="pro", layers=4)]
    for kernels in ("default", "portable"):
        rows += [
            row(f"ready.{what}", 0, what, kernels=kernels, first=[]) for what in ("kernels", "modules", "programs")
        ]
    for preset in ("flash", "pro"):
        rows += [row("made.generated", [4, 4], "tokens", preset=preset, layers=2)]
        rows += [row("made.seconds_in_all", 9.0, "s", preset=preset, layers=2)]
    rows += [row("explain.bound", {"gemm.linear": "deep_gemm"}, "kernels", unbound=[], planned=[])]
    rows += [row("override.ran", 1.0, "share", op="gemm.linear", kernel="triton", is_reference=False)]
    rows += [row("parity.calls", 100, "calls", kernels="portable")]
    for caches in ("warm", "empty"):
        rows += [row("start.first_token", 20.0, "s", kernels="default", caches=caches, layers=36)]
        rows += [
            row("start.where", {"import torch": 5.0, "weights": 15.0}, "s", kernels="default", caches=caches, layers=36)
        ]
    for ops in (["a"], ["b"], ["c"]):
        rows += [row("sanitizer.errors", 0, "errors", tool="memcheck", ops=ops)]
        rows += [row("sanitizer.calls", 9, "cases", tool="memcheck", ops=ops)]
    rows += [row("sanitizer.errors", 0, "errors", tool="racecheck", ops=[])]
    rows += [row("sanitizer.calls", 9, "cases", tool="racecheck", ops=[])]
    rows += [
        row("speed.kernel", 5.0, "us", op="gemm.linear", kernel=k, case="a", dtype="bfloat16")
        for k in ("triton", "tilelang")
    ]
    rows += [row("wheel.command", 0, "exit status", command=command, python="3.12.3") for command in ("demo", "doctor")]
    return [*rows, *one_server(), *two_gpus()]


def two_step(batch: int, share: float, mode: str = "tp") -> dict[str, Any]:
    params = {**FLASH, "layers": 43, "batch": batch, "context": 8192, "mode": mode, "graph": True}
    return row("two_decode.step", 1.0, "ms", share=share, roof=share, **params)


def two_agreement(mode: str, same: float = 0.99, items: int = 326) -> dict[str, Any]:
    value = {"same": same, "score": 0.985, "reference_score": 0.988, "p": 0.5}
    return row("two_graded.agreement", value, "share", mode=mode, batch=32, **{**GRADED, "items": items})


def exchange(*, right: bool = True, replayed: bool = True, kernel: str = "nccl") -> dict[str, Any]:
    value = {"eager": [[True], [True]], "replayed": [[True], [right]] if replayed else [[], []]}
    return row(
        "two_smoke.exchange", value, "right on each rank", mode="tp-ep", op="collective.all_reduce", kernel=kernel
    )


def reduced(microseconds: float, kernel: str) -> dict[str, Any]:
    params = {"op": "collective.all_reduce", "bytes": 8192, "graph": True}
    return row("two.collective", microseconds, "us", kernel=kernel, **params)


def left_out(name: str) -> dict[str, Any]:
    return row(name, "needs several ranks", "text", op="collective.all_reduce", kernel="symm_mem")


def ended(status: int | None = 0, left: tuple[int, ...] = ()) -> dict[str, Any]:
    value = {"status": status, "seconds": 1.0}
    return row("two_serve.ended", value, "status and seconds", layers=43, left=list(left))


def two_gpus() -> list[dict[str, Any]]:
    """Rows with which every line of two GPUs holds: one mode is enough for a share."""
    rows = [exchange(), row("two_smoke.replay", True, "bits", mode="tp-ep", kernels="portable")]
    for batch, share in ((1, 0.26), (32, 0.46), (128, 0.46)):
        rows += [two_step(batch, share), two_step(batch, 0.1, mode="ep")]
        params = {**FLASH, "layers": 43, "batch": batch, "context": 8192, "mode": "tp"}
        rows += [row("two_decode.finite", True, "bool", **params)]
    rows += [
        reduced(9.5, "nccl"),
        two_agreement("tp-ep"),
        two_agreement("dp", items=8),
    ]
    rows += [row("two_generate.tokens", 32, "tokens", layers=4, asked=32)]
    rows += [row("two_serve.ready", 90.0, "s", layers=43), ended()]
    rows += [row("two_serve.where", [[1.5, "ready"]], "s", layers=43)]
    rows += [row("two_serve.rate", 50.0, "tokens/s", layers=43, at_once=at_once) for at_once in (1, 8)]
    return rows


def one_server() -> list[dict[str, Any]]:
    """Rows of a server on one device."""
    level = {name: {"avg": 1.0, "p50": 1.0, "p99": 2.0} for name in ("time_to_first_token", "inter_token_latency")}
    level["output_token_throughput"] = {"avg": 1234.0}
    rows = [row("serve.ready", 30.0, "s", layers=16)]
    rows += [row("serve.rate", 50.0, "tokens/s", layers=16, at_once=at_once) for at_once in (1, 8)]
    rows += [row("serve.load", level, "as named", layers=16, at_once=8, input=1024, output=128)]
    rows += [row("serve.ended", {"status": 0, "seconds": 1.0}, "status and seconds", layers=16, left=[])]
    return rows


def judged(rows: list[dict[str, Any]], words: str) -> tuple[bool | None, str]:
    (found,) = (verdict for verdict in verdicts(rows) if words in verdict.line)
    return found.passed, found.said


def test_every_line_holds_with_good_rows() -> None:
    assert [verdict.line for verdict in verdicts(good()) if not verdict.passed] == []


def test_every_line_is_not_run_without_rows() -> None:
    assert {verdict.passed for verdict in verdicts([])} == {None}
    assert len(verdicts([])) == len(CRITERIA)


BAD = [
    ("every kernel but tilelang", parity("deep_gemm", within=2)),
    ("every kernel but tilelang", parity("deep_gemm", complete=False)),
    ("AMD's kernels here: tilelang", parity("tilelang", within=2)),
    ("AMD's kernels here: portable", parity("triton", within=2)),
    ("default kernels, graphs: score", agreement("default", 32, same=0.979)),
    ("default kernels, graphs: score", agreement("default", 1, score=0.9, p=0.01)),
    ("graded model on portable", agreement("portable", 1, same=0.5)),
    ("graded model with tilelang", agreement("tilelang", 32, same=0.5)),
    ("each half of four", half(0.9989)),
    ("each half of four", half(error=0.09)),
    ("each half of four", half(finite=False)),
    ("each half of four", row("width", "RuntimeError", "error", kernels="default")),
    ("embeddings are nudged", cosine("served", 0.9974)),
    ("embeddings are nudged", cosine("served", finite=False)),
    ("the same against float32", cosine("float32", 0.9974)),
    ("graphs equal eager", row("graph.apart", 1, "of 50", kernels="default", what="changing lengths")),
    ("graphs equal eager", row("graph.neighbour", False, "bool", kernels="default")),
    ("device tests", row("tests.counts", {"executed": 9, "failed": 1}, "tests", paths=["a"], failed=["t"])),
    ("device tests", row("tests.counts", {"executed": 0, "failed": 0, "skipped": 9}, "tests", paths=["a"], failed=[])),
    ("batch 1: at least 30%", step(1, 0.299)),
    ("batch 8: at least 45%", step(8, 0.44)),
    ("batch 32: at least 50%", step(32, 0.49)),
    ("batch 128: at least 50%", step(128, 0.49)),
    ("batch 8: at least 45%", row("decode.finite", False, "bool", **FLASH, batch=8, context=8192)),
    ("distinct experts", row("decode.experts", [6, 7], "experts", roof=44.2, **FLASH, batch=8, context=8192)),
    ("prefill of 8,192", row("prefill.rate", 1, "tokens/s", share=0.24, roof=4, **FLASH, tokens=8192)),
    ("Transformers", row("peer.factor", 14.9, "x faster", layers=4)),
    ("once ready, default", row("ready.modules", 1, "modules", kernels="default", first=["x"])),
    ("once ready, portable", row("ready.kernels", 2, "kernels", kernels="portable", first=["x"])),
    ("explain on", row("explain.bound", {"gemm.linear": "reference"}, "kernels", unbound=[], planned=[])),
    ("explain on", row("explain.bound", {"gemm.linear": None}, "kernels", unbound=["gemm.linear"], planned=[])),
    ("make-model", row("made", "RuntimeError", "error", preset="pro", layers=1)),
    ("every override", row("override", "ValueError", "error", op="gemm.linear", kernel="triton", is_reference=False)),
    ("compare mode", row("parity.generation", "ValueError", "error", kernels="triton")),
    ("memcheck", row("sanitizer.errors", 2, "errors", tool="memcheck", ops=["a"])),
    ("memcheck", row("sanitizer.calls", 0, "cases", tool="memcheck", ops=["a"])),
    ("racecheck", row("sanitizer", "RuntimeError", "error", tool="racecheck", ops=[])),
    ("the wheel", row("wheel.command", 1, "exit status", command="demo", python="3.12.3")),
    ("exchanges give right", exchange(right=False)),
    ("exchanges give right", exchange(replayed=False)),
    ("exchanges give right", left_out("parity.left_out")),
    ("exchanges give right", left_out("override.left_out")),
    ("all-reduce inside a graph", reduced(9.6, "symm_mem")),
    ("exchanges give right", row("two_smoke.replay", False, "bits", mode="tp-ep", kernels="portable")),
    ("exchanges give right", row("two_smoke.ranks", "they ended with 1", "error", mode="dp")),
    ("depth, batch 1: at least 25%", two_step(1, 0.249)),
    ("depth, batch 32: at least 45%", two_step(32, 0.449)),
    ("depth, batch 128: at least 45%", two_step(128, 0.449)),
    ("score and 98 % equal answers, by mode", two_agreement("dp", same=0.9)),
    ("generate starts its ranks", row("two_generate.tokens", 31, "tokens", layers=4, asked=32)),
    ("depth: serve loads, answers", ended(status=1)),
    ("depth: serve loads, answers", ended(left=(7,))),
    ("depth: serve loads, answers", row("two_serve", "RuntimeError", "error")),
    ("one device: serve loads", row("serve.ready", 9.0, "s", layers=4)),
    ("one device: serve loads", row("serve.ended", {"status": 0, "seconds": 1.0}, "status", layers=16, left=[7])),
]  # fmt: skip


@pytest.mark.parametrize(("words", "bad"), BAD, ids=range(len(BAD)))
def test_one_bad_row_fails_its_line(words: str, bad: dict[str, Any]) -> None:
    rows = good()
    if bad["name"] == "sanitizer.calls":
        rows = [one for one in rows if one["name"] != "sanitizer.calls" or one["params"]["tool"] != "memcheck"]
    assert judged([*rows, bad], words)[0] is False


def test_a_score_apart_is_allowed_when_the_pairs_do_not_tell() -> None:
    rows = [agreement("default", 1, score=0.95, p=0.06), agreement("default", 32)]
    assert judged(rows, "default kernels, graphs: score")[0] is True


def test_what_ran_again_replaces_what_was_said_before() -> None:
    rows = [step(1, 0.2), step(1, 0.35)]
    assert judged(rows, "8 layers, batch 1: at least")[0] is True
    assert len(latest(rows)) == 1


def test_a_failure_is_forgotten_when_the_same_came_to_a_good_end() -> None:
    params = {"op": "gemm.linear", "kernel": "triton", "is_reference": False}
    failure, done = row("override", "ValueError", "error", **params), row("override.seconds", 1.0, "s", **params)
    ran = row("override.ran", 1.0, "share", **params)
    assert judged([failure, ran, done], "every override")[0] is True
    assert judged([ran, done, failure], "every override")[0] is False


def test_what_needs_several_ranks_is_named_and_judged_by_what_these_show() -> None:
    """An earlier session tried it in one process, where no input is for it and no override can be honoured."""
    tried = parity("symm_mem", 0, "collective.all_reduce")
    tried["value"]["cases"] = 0
    failed = row(
        "override", "NoKernelError", "error", op="collective.all_reduce", kernel="symm_mem", is_reference=False
    )
    rows = [*good(), tried, failed]
    for words in ("every kernel but tilelang", "every override"):
        assert judged(rows, words)[0] is False
        passed, said = judged([*rows, left_out("parity.left_out"), left_out("override.left_out")], words)
        assert passed
        assert said.endswith("left to several ranks: collective.all_reduce=symm_mem")
    shown = [*good(), left_out("parity.left_out"), exchange(kernel="symm_mem")]
    passed, said = judged(shown, "exchanges give right")
    assert passed
    assert "eager and replayed: all_reduce=nccl, all_reduce=symm_mem;" in said
    assert "left to several ranks" not in judged(shown, "AMD's kernels here: portable")[1]


def test_a_kernel_that_no_input_suits_fails() -> None:
    bare = parity("deep_gemm", 0)
    bare["value"]["cases"] = 0
    assert judged([*good(), bare], "every kernel but tilelang")[0] is False


def test_tables_show_ours_beside_the_peers() -> None:
    found = tables(good())
    assert "| flash | 8 | default | 1 | 0.31 | 1.00 | 31% | 37% | 40% | - | - |" in found["Decode steps"]
    assert "| 36 | empty | 5.0 | 15.0 | 20.0 |" in found["Start to the first token, seconds"]
    assert "| `gemm.linear` | a bfloat16 | 5.0 | 5.0 |" in found["Microseconds of kernels at a released model's sizes"]
    assert (
        "| `gemm.linear` | triton | 3 of 3 |  | 1.0e-03, 50% of what is allowed |" in found["Parity with the reference"]
    )


# ---- the command ----------------------------------------------------------------------------------------------------


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_rows_of_two_calls_become_one_file_with_their_facts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = good()
    rows[0]["versions"] = {"python": "3.12.3", "tilelang": "0.1.15"}
    first, second = written(tmp_path / "1", rows[:9]), written(tmp_path / "2", rows[9:])
    out = tmp_path / "h200" / "c.json"
    assert gpu_results.main([first, second, "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert (kept["device"], kept["commit"]) == ("NVIDIA H200", "c")
    assert kept["versions"] == {"python": "3.12.3", "tilelang": "0.1.15"}
    assert len(kept["rows"]) == len(latest(rows))
    assert set(kept["rows"][0]) == {"name", "params", "value", "unit", "roof", "share"}
    assert "| pass | decode, 8 layers, batch 1: at least 30% of the roof | 1.000 ms, 31.0% of 0.31 ms |" in (
        capsys.readouterr().out
    )


def test_a_line_that_was_not_run_is_no_success(tmp_path: Path) -> None:
    assert gpu_results.main([written(tmp_path / "1", good()[:3])]) == 1


@pytest.mark.parametrize("change", [{"commit": "d"}, {"device": "cpu"}, {"versions": {"python": "3.11.7"}}])
def test_rows_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [parity("triton"), {**parity("deep_gemm"), **change}]
    assert gpu_results.main([written(tmp_path / "1", rows)]) == 2
    assert "keep them apart" in capsys.readouterr().err


def test_a_kept_file_says_again_what_its_rows_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls, kept = written(tmp_path / "1", good()), tmp_path / "c.json"
    assert gpu_results.main([calls, "--out", str(kept)]) == 0
    said, _, count = capsys.readouterr().out.rpartition("\n\n")
    assert f" of {len(good())} rows in {kept}" in count
    assert gpu_results.main([str(kept)]) == 0

    def words(text: str) -> list[list[str]]:  # kept rows are sorted
        return sorted(sorted(line.replace(",", "").split()) for line in text.splitlines() if line)

    assert words(capsys.readouterr().out) == words(said)


def test_what_readme_quotes_of_one_device_passes_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that were taken on the device, judged by the lines of today."""
    passed: set[str] = set()
    for commit in ("8536f1e", "3a37ea7"):
        assert f"`{commit}`" in README.read_text(encoding="utf-8")
        gpu_results.main([str(RESULTS / f"{commit}.json")])
        verdicts = [row.split("|")[1:3] for row in capsys.readouterr().out.splitlines() if row.startswith("| ")]
        assert not [line for mark, line in verdicts if mark.strip() == "FAIL"]
        passed |= {line.strip() for mark, line in verdicts if mark.strip() == "pass"}
    assert {one.line for one in CRITERIA if not one.line.startswith("two GPUs")} <= passed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "has no row; name the rows.jsonl"),
        ('{"rows": []}', "has no row; name the rows.jsonl"),
        ('{"name": "decode.step"}\n[1]\n', "has no row; name the rows.jsonl"),
    ],
)
def test_a_file_without_rows_is_refused(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    assert gpu_results.main([str(path)]) == 2
    assert message in capsys.readouterr().err
