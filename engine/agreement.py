"""Comparing the answers of two runs: two backends, two recipes, two checkpoints. Free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from halocline.hal.errors import RequestError, lines

if TYPE_CHECKING:
    from halocline.engine.evaluation import Mark

__all__ = ["Agreement", "EarlierAnswer", "compare_answers", "load_answers", "paired_p"]


class EarlierAnswer(NamedTuple):
    """An answer of another run."""

    output: str
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How this run relates to another one, over the exercises that both answered.

    Attributes:
        num_common: Exercises that both answered.
        same: Share of them with the same raw text.
        score: Of this run.
        other_score: Of the other run.
        p: Two-sided exact test of the pairs in which one run alone is right (McNemar): how often a difference this
            large or larger would come about if neither run were the better one.
    """

    num_common: int
    same: float
    score: float
    other_score: float
    p: float


def load_answers(path: Path) -> dict[str, EarlierAnswer]:
    """Reads the answers of an earlier `halocline eval --json`, by exercise.

    Raises:
        RequestError: If the file holds none.
    """
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))["answers"]
        return {one["name"]: EarlierAnswer(one["output"], one["is_right"]) for one in answers}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            lines(
                f"{path} holds no answers",
                found=f"{type(error).__name__}: {error}",
                try_="a file written by `halocline eval --json`",
            )
        ) from error


def compare_answers(marks: Sequence[Mark], other: Mapping[str, EarlierAnswer]) -> Agreement:
    """Compares marked answers with those of another run.

    Raises:
        RequestError: If the runs have no exercise in common.
    """
    pairs = [(mark, other[mark.exercise.name]) for mark in marks if mark.exercise.name in other]
    if not pairs:
        raise RequestError(lines("the two runs have no exercise in common", try_="the answers of the same suite"))
    num_common = len(pairs)
    only_here = sum(mark.is_right and not earlier.is_right for mark, earlier in pairs)
    only_there = sum(earlier.is_right and not mark.is_right for mark, earlier in pairs)
    return Agreement(
        num_common=num_common,
        same=sum(mark.output == earlier.output for mark, earlier in pairs) / num_common,
        score=sum(mark.is_right for mark, _ in pairs) / num_common,
        other_score=sum(earlier.is_right for _, earlier in pairs) / num_common,
        p=paired_p(only_here, only_there),
    )


def paired_p(only_here: int, only_there: int) -> float:
    """Two-sided exact binomial probability of a split at least as uneven, each side being as likely."""
    num_pairs, fewer = only_here + only_there, min(only_here, only_there)
    as_uneven = sum(math.comb(num_pairs, count) for count in range(fewer + 1))
    return min(1.0, as_uneven / 2.0 ** (num_pairs - 1))
