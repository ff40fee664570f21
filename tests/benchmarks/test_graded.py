"""Figures of the graded model: what is kept of a run, and which difference from the baseline is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halocline.benchmarks.graded import BASELINE, RUNS, Run, judge, main, table
from halocline.engine.agreement import EarlierAnswer

Answers = dict[str, EarlierAnswer]

ROOT = Path(__file__).resolve().parents[2]


def _answers(num_right: int, num_wrong: int) -> Answers:
    marks = [True] * num_right + [False] * num_wrong
    return {f"sums-{i}": EarlierAnswer(str(is_right), is_right) for i, is_right in enumerate(marks)}


def test_three_of_three_hundred_are_a_hundredth_and_four_are_more() -> None:
    strict = Run(options=(), most=0.01, chance=False)
    assert judge(strict, _answers(297, 3), _answers(300, 0))["holds"]
    assert judge(strict, _answers(300, 0), _answers(297, 3))["holds"]
    assert not judge(strict, _answers(296, 4), _answers(300, 0))["holds"]


def test_a_larger_difference_is_allowed_when_it_may_be_chance() -> None:
    """Five pairs against none: p is 2 / 32; six: 2 / 64."""
    assert judge(Run(options=()), _answers(95, 5), _answers(100, 0))["p"] == pytest.approx(1 / 16)
    assert judge(Run(options=()), _answers(95, 5), _answers(100, 0))["holds"]
    assert not judge(Run(options=()), _answers(94, 6), _answers(100, 0))["holds"]


def test_the_plain_checkpoint_may_be_worse_but_not_better() -> None:
    plain = Run(options=(), chance=False, is_plain=True)
    assert judge(plain, _answers(50, 50), _answers(100, 0))["holds"]
    assert not judge(plain, _answers(100, 0), _answers(97, 3))["holds"]


def test_exercises_that_were_left_out_do_not_count() -> None:
    found = judge(RUNS["steps-of-1"], _answers(8, 2), _answers(8, 90))
    assert (found["exercises"], found["score"], found["baseline_score"], found["same"]) == (10, 0.8, 0.8, 1.0)


def _write(work: Path, name: str, answers: Answers) -> None:
    report = {
        "score": sum(one.is_right for one in answers.values()) / len(answers),
        "lessons": {"sums": {"score": 0.5, "right": 1, "total": 2}},
        "commit": "abc",
        "answers": [{"name": key, "output": one.output, "is_right": one.is_right} for key, one in answers.items()],
    }
    (work / f"{name}.json").write_text(json.dumps(report))


def test_figures_are_kept_with_what_was_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, BASELINE, _answers(9, 1))
    _write(tmp_path, "float32", _answers(8, 2))
    out = tmp_path / "kept" / "cpu.json"
    assert main(["keep", "--work", str(tmp_path), "--out", str(out)]) == 1
    baseline, other = json.loads(out.read_text())
    assert (baseline["run"], baseline["commit"], baseline["against_baseline"]["holds"]) == (BASELINE, "abc", True)
    assert other["wrong"] == [{"name": "sums-8", "output": "False"}, {"name": "sums-9", "output": "False"}]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("| 10 | 0.900 | sums 0.500 | 0.900 | 1.000 | 1.000 | holds |")
    assert lines[3].endswith("| 10 | 0.800 | sums 0.500 | 0.900 | 0.900 | 1.000 | MISSED |")


def test_the_documented_table_is_that_of_the_kept_figures() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "graded" / "cpu.json").read_text(encoding="utf-8"))
    assert "\n".join(table(rows)) in (ROOT / "docs" / "graded.md").read_text(encoding="utf-8")
    assert all(row["against_baseline"]["holds"] for row in rows)


def test_an_unknown_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "float64", "--work", str(tmp_path)])
    assert "no such run: float64" in capsys.readouterr().err
