"""The shipped suites: built by this code, held out, and of the promised sizes."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from halocline.engine.grading import MAX_NEW_TOKENS, Exercise, grade, load_suite, load_texts
from halocline.training.data import Encoder
from halocline.training.split import split_of
from halocline.training.suites import build_suites


def _suite(graded: Path, name: str) -> list[Exercise]:
    return load_suite(graded / "suites" / f"{name}.jsonl")


def test_building_them_again_gives_the_shipped_files(tmp_path: Path, graded: Path) -> None:
    shutil.copy(graded / "tokenizer.json", tmp_path)
    build_suites(tmp_path)
    built = sorted(path.name for path in (tmp_path / "suites").iterdir())
    assert built == sorted(path.name for path in (graded / "suites").iterdir())
    for name in built:
        assert (tmp_path / "suites" / name).read_bytes() == (graded / "suites" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "least", "most", "most_tokens"),
    [("graded", 300, 400, 200_000), ("check", 40, 60, 40_000), ("quick", 18, 24, 8_000)],
)
def test_sizes(graded: Path, name: str, least: int, most: int, most_tokens: int) -> None:
    suite = _suite(graded, name)
    assert least <= len(suite) <= most
    assert sum(exercise.prompt_tokens for exercise in suite) <= most_tokens
    assert {one.lesson for one in suite} == {"sums", "lookup", "copying", "facts", "chat", "tools"}


def test_all_suites_together_stay_small(graded: Path) -> None:
    assert sum(path.stat().st_size for path in (graded / "suites").iterdir()) < 1_500_000


def test_look_ups_reach_six_thousand_tokens(graded: Path) -> None:
    lookups = [one for one in _suite(graded, "graded") if one.lesson == "lookup"]
    assert max(one.prompt_tokens for one in lookups) >= 6000
    assert sum(one.prompt_tokens >= 1900 for one in lookups) >= 20


def test_smaller_suites_are_parts_of_the_full_one(graded: Path) -> None:
    full = {one.name: one for one in _suite(graded, "graded")}
    for name in ("check", "quick"):
        assert all(full[one.name] == one for one in _suite(graded, name))


def test_every_lesson_is_asked_with_thinking_and_without(graded: Path) -> None:
    modes = Counter((one.lesson, one.thinking) for one in _suite(graded, "graded"))
    assert len(modes) == 12
    assert min(modes.values()) >= 8


def test_targets_are_right_and_short_enough(graded: Path, encoder: Encoder) -> None:
    for exercise in _suite(graded, "graded"):
        assert grade(exercise, exercise.target)
        assert len(encoder.tokenizer.encode(exercise.target, add_special_tokens=False).ids) <= MAX_NEW_TOKENS


def test_told_codes_are_held_out(graded: Path) -> None:
    for exercise in _suite(graded, "graded"):
        if exercise.lesson == "lookup":
            holder, _, code = (exercise.expected_text or "").removeprefix("The code of the ").partition(" is ")
            assert split_of(f"code:{holder}:{code.removesuffix('.')}") == "held_out"


def test_texts_are_held_out_stories(graded: Path) -> None:
    texts = load_texts(graded / "suites" / "text.jsonl")
    assert len(texts) == 24
    assert {split_of(f"text:{story}") for text in texts for story in text.split("\n")} == {"held_out"}
