"""The marks measure what they should: a kernel that is wrong in one way costs marks.

Right answers are read instead of written, in one prefill through the engine; see teacher.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_model import (
    Plant,
    empty_compressed_caches,
    planted_model,
    shuffled_selection,
    with_rope_of_plain_layers,
)
from teacher import greedy_share, read_answers

from halocline.engine.grading import MAX_NEW_TOKENS, Exercise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LONGEST = 1300
LEAST_COST = 0.05
OPTIONS = {"recipe": "recipe", "progress": False}


@pytest.fixture(scope="module")
def suite(check_suite: list[Exercise]) -> list[Exercise]:
    return [exercise for exercise in check_suite if exercise.prompt_tokens <= LONGEST]


def _share(folder: Path, suite: list[Exercise], plant: Plant | None = None) -> float:
    with planted_model(folder, plant, max_positions=LONGEST + 2 * MAX_NEW_TOKENS, **OPTIONS) as llm:
        return greedy_share(read_answers(llm, suite))


@pytest.fixture(scope="module")
def intact_share(graded: Path, suite: list[Exercise]) -> float:
    return _share(graded, suite)


@pytest.mark.parametrize("plant", [shuffled_selection, empty_compressed_caches], ids=lambda plant: plant.__name__)
def test_far_tokens_are_needed(graded: Path, suite: list[Exercise], intact_share: float, plant: Plant) -> None:
    assert _share(graded, suite, plant) <= intact_share - LEAST_COST


def test_each_kind_of_layer_needs_its_own_rope(
    graded: Path, suite: list[Exercise], intact_share: float, tmp_path: Path
) -> None:
    assert _share(with_rope_of_plain_layers(graded, tmp_path / "rope"), suite) <= intact_share - LEAST_COST
