"""Marking of answers: suites of exercises with known answers, and the rules of exact match.

A suite is a file of JSON lines, one exercise a line. Running the exercises is left to the caller;
this module reads a suite, takes a model's raw output apart and says whether it is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "MAX_NEW_TOKENS",
    "Answer",
    "Call",
    "Exercise",
    "LessonScore",
    "grade",
    "load_suite",
    "load_texts",
    "parse_output",
    "score",
]

# No right answer of the suites needs more; a model that has not ended by then is wrong.
MAX_NEW_TOKENS = 128

_EOS = "<｜end▁of▁sentence｜>"
_THINK_END = "</think>"
_CALLS = re.compile(r"\n\n<｜DSML｜tool_calls>\n(?P<body>.*)</｜DSML｜tool_calls>", re.DOTALL)
_INVOKE = re.compile(
    r'<｜DSML｜invoke name="(?P<name>[^"]*)">\n(?P<body>.*?)</｜DSML｜invoke>\n',
    re.DOTALL,
)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="(?P<name>[^"]*)" string="(?P<is_string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>\n",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call with its parsed arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A model's output taken apart; `calls` is None when its markup cannot be read."""

    reasoning: str | None
    content: str
    calls: tuple[Call, ...] | None


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise of a suite.

    Attributes:
        name: Unique in its suite.
        lesson: What it teaches; scores are given per lesson.
        kind: A finer name inside the lesson.
        messages: The conversation, as an OpenAI chat request states it.
        tools: The tools on offer, likewise.
        thinking: Whether the model thinks before it answers; the effort is always low.
        expected_text: The right content, or None where calls are expected.
        expected_calls: The right calls, in order.
        target: The right output as raw text, reasoning and end token included.
        prompt_tokens: Size of the prompt with the graded model's tokenizer.
    """

    name: str
    lesson: str
    kind: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    thinking: bool
    expected_text: str | None
    expected_calls: tuple[Call, ...]
    target: str
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class LessonScore:
    """How many of a lesson's exercises were right."""

    right: int
    total: int

    @property
    def share(self) -> float:
        """Right answers as a share of all."""
        return self.right / self.total


def _exercise(line: str, place: str) -> Exercise:
    try:
        raw = json.loads(line)
        expected = raw["expected"]
        return Exercise(
            name=raw["name"],
            lesson=raw["lesson"],
            kind=raw["kind"],
            messages=tuple(raw["messages"]),
            tools=tuple(raw["tools"]),
            thinking=raw["thinking"],
            expected_text=expected.get("text"),
            expected_calls=tuple(Call(**one) for one in expected.get("calls", ())),
            target=raw["target"],
            prompt_tokens=raw["prompt_tokens"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is not an exercise: {error!r}; build the suites again") from error


def load_suite(path: Path) -> list[Exercise]:
    """Read a suite of JSON lines.

    Raises:
        ValueError: If a line is not an exercise, or two have one name.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    suite = [_exercise(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    if len({one.name for one in suite}) != len(suite):
        raise ValueError(f"{path} names an exercise twice; build the suites again")
    return suite


def load_texts(path: Path) -> list[str]:
    """Read the plain texts of a file of JSON lines, for perplexity and draft acceptance."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def _parse_whole(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """Return the matches that cover the whole text one after the other, else None."""
    matches, place = [], 0
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            return None
        matches.append(match)
        place = match.end()
    return matches


def _parse_call(invoke: re.Match[str]) -> Call | None:
    parameters = _parse_whole(_PARAMETER, invoke["body"])
    if parameters is None:
        return None
    arguments: dict[str, Any] = {}
    for one in parameters:
        try:
            value = one["value"] if one["is_string"] == "true" else json.loads(one["value"])
        except ValueError:
            return None
        if one["name"] in arguments:
            return None
        arguments[one["name"]] = value
    return Call(name=invoke["name"], arguments=arguments)


def parse_output(text: str, *, thinking: bool) -> Answer:
    """Take a model's raw output apart, strictly: markup that is nearly right is not right."""
    text = text.removesuffix(_EOS)
    reasoning: str | None = None
    if thinking:
        reasoning, end, text = text.partition(_THINK_END)
        if not end:
            return Answer(reasoning=reasoning, content="", calls=())
    found = _CALLS.search(text)
    if found is None:
        readable = "<｜DSML｜" not in text
        return Answer(reasoning=reasoning, content=text, calls=() if readable else None)
    invokes = _parse_whole(_INVOKE, found["body"])
    calls = [_parse_call(one) for one in invokes or ()]
    complete = [one for one in calls if one is not None]
    is_whole = invokes and len(complete) == len(calls) and not text[found.end() :].strip()
    return Answer(reasoning=reasoning, content=text[: found.start()], calls=tuple(complete) if is_whole else None)


def _same(one: object, other: object) -> bool:
    """Compare JSON values: 2 equals 2.0, but true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other


def grade(exercise: Exercise, output: str) -> bool:
    """Say whether a model's raw output answers an exercise.

    The content has to be the expected text, spaces around it aside, and there have to be exactly
    the expected calls, in their order, with equal arguments. The reasoning is not marked, but it
    has to come to an end.
    """
    answer = parse_output(output, thinking=exercise.thinking)
    if answer.calls is None or len(answer.calls) != len(exercise.expected_calls):
        return False
    if answer.content.strip() != (exercise.expected_text or "").strip():
        return False
    return all(
        call.name == expected.name and _same(call.arguments, expected.arguments)
        for call, expected in zip(answer.calls, exercise.expected_calls, strict=True)
    )


def score(suite: Sequence[Exercise], right: Iterable[bool]) -> dict[str, LessonScore]:
    """Count right answers per lesson, in the order in which lessons appear."""
    marks: dict[str, list[bool]] = {}
    for exercise, is_right in zip(suite, right, strict=True):
        marks.setdefault(exercise.lesson, []).append(is_right)
    return {lesson: LessonScore(right=sum(given), total=len(given)) for lesson, given in marks.items()}
