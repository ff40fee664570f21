"""Comparing two runs: shares over what both answered, and the exact test of the pairs."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from halocline.engine.agreement import EarlierAnswer, compare_answers, load_answers, paired_p
from halocline.engine.evaluation import Evaluation, Mark
from halocline.engine.grading import Exercise
from halocline.hal.errors import RequestError


def _mark(name: str, output: str, *, is_right: bool) -> Mark:
    exercise = Exercise(
        name=name,
        lesson=name.partition("-")[0],
        kind="kind",
        messages=(),
        tools=(),
        thinking=False,
        expected_text="x",
        expected_calls=(),
        target="x",
        prompt_tokens=1,
    )
    return Mark(exercise=exercise, output=output, is_right=is_right)


@pytest.mark.parametrize(("here", "there"), [(0, 0), (1, 0), (5, 0), (3, 1), (2, 2), (7, 2)])
def test_the_paired_test_counts_all_ways_to_split_the_pairs(here: int, there: int) -> None:
    """Every way in which the pairs could have fallen, written out."""
    num_pairs = here + there
    ways = [sum(way) for way in product((0, 1), repeat=num_pairs)]
    as_uneven = sum(abs(2 * ones - num_pairs) >= abs(here - there) for ones in ways)
    assert paired_p(here, there) == pytest.approx(as_uneven / len(ways))
    assert paired_p(there, here) == paired_p(here, there)


def test_only_exercises_that_both_answered_count() -> None:
    marks = [_mark("a-0", "1", is_right=True), _mark("a-1", "2", is_right=False), _mark("a-2", "3", is_right=True)]
    other = {"a-0": EarlierAnswer("1", True), "a-1": EarlierAnswer("9", True), "b-7": EarlierAnswer("0", False)}
    found = compare_answers(marks, other)
    assert (found.num_common, found.same, found.score, found.other_score, found.p) == (2, 0.5, 0.5, 1.0, 1.0)


def test_runs_without_a_common_exercise_are_refused() -> None:
    with pytest.raises(RequestError, match="no exercise in common"):
        compare_answers([_mark("a-0", "1", is_right=True)], {"b-0": EarlierAnswer("1", True)})


def test_a_report_is_what_a_later_run_reads(tmp_path: Path) -> None:
    marks = (_mark("a-0", "1", is_right=True), _mark("b-0", "2", is_right=False))
    run = Evaluation(marks=marks, prompt_tokens=2, cached_tokens=0, completion_tokens=2, seconds=1.0)
    (tmp_path / "run.json").write_text(json.dumps(run.to_json()))
    assert load_answers(tmp_path / "run.json") == {"a-0": EarlierAnswer("1", True), "b-0": EarlierAnswer("2", False)}
    assert run.score == 0.5
    assert run.to_json()["lessons"]["b"] == {"score": 0.0, "right": 0, "total": 1}


@pytest.mark.parametrize("content", ["", "[]", '{"answers": [{"name": "a"}]}'])
def test_a_file_without_answers_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RequestError, match="holds no answers"):
        load_answers(tmp_path / "run.json")
