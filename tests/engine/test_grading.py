"""Marking: what counts as the right answer, and what only looks like it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halocline.engine.grading import Answer, Call, Exercise, LessonScore, grade, load_suite, parse_output, score

EOS = "<｜end▁of▁sentence｜>"
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
ROME = Call(name="get_weather", arguments={"city": "Rome", "days": 2})


def _exercise(*, text: str | None = None, calls: tuple[Call, ...] = (), thinking: bool = False) -> Exercise:
    return Exercise(
        name="one",
        lesson="lesson",
        kind="kind",
        messages=(),
        tools=(),
        thinking=thinking,
        expected_text=text,
        expected_calls=calls,
        target="",
        prompt_tokens=1,
    )


def _with_value(value: str, *, is_string: str = "false") -> str:
    return CALL.replace('string="false">2<', f'string="{is_string}">{value}<')


@pytest.mark.parametrize(
    ("output", "is_right"),
    [
        ("12", True),
        ("12" + EOS, True),
        (" 12\n" + EOS, True),
        ("13", False),
        ("1 2", False),
        ("12.", False),
        ("", False),
        ("12" + CALL, False),
        ("</think>12", False),
        ("12" + EOS + EOS, False),
    ],
)
def test_a_text_has_to_match_exactly(output: str, is_right: bool) -> None:
    assert grade(_exercise(text="12"), output) is is_right


@pytest.mark.parametrize(
    ("output", "is_right"),
    [
        ("2+3=5, 1=1</think>15" + EOS, True),
        ("wrong thoughts</think>15", True),
        ("</think>15", True),
        ("15", False),
        ("2+3=5</think>", False),
        ("15</think>16", False),
    ],
)
def test_thinking_has_to_end_and_is_not_marked(output: str, is_right: bool) -> None:
    assert grade(_exercise(text="15", thinking=True), output) is is_right


@pytest.mark.parametrize(
    ("output", "is_right"),
    [
        (CALL + EOS, True),
        (CALL, True),
        (_with_value("2.0"), True),
        (_with_value("3"), False),
        (_with_value("2", is_string="true"), False),
        (_with_value("true"), False),
        (_with_value("two"), False),
        (CALL.replace("get_weather", "set_weather"), False),
        (CALL.replace('name="city"', 'name="town"'), False),
        (CALL.replace('name="city"', 'name="days"'), False),
        (CALL.replace("Rome", "Rome "), False),
        ("I call." + CALL, False),
        (CALL + "done", False),
        (CALL.removeprefix("\n"), False),
        (CALL.removesuffix("</｜DSML｜tool_calls>"), False),
        (CALL.replace("</｜DSML｜invoke>\n", ""), False),
        (CALL.replace("\n</｜DSML｜invoke>", "\nnoise\n</｜DSML｜invoke>"), False),
        ('{"city": "Rome", "days": 2}', False),
    ],
)
def test_a_call_has_to_match_in_name_types_and_values(output: str, is_right: bool) -> None:
    assert grade(_exercise(calls=(ROME,)), output) is is_right


@pytest.mark.parametrize(
    ("expected", "written", "is_right"),
    [
        (True, "true", True),
        (True, "1", False),
        (1, "true", False),
        (None, "null", True),
        (None, '""', False),
        ([1, 2], "[1, 2]", True),
        ([1, 2], "[2, 1]", False),
        ([1], "[true]", False),
        ({"a": {"b": [None]}}, '{"a":{"b":[null]}}', True),
        ({"a": 1}, '{"a": 1, "b": 2}', False),
    ],
)
def test_arguments_are_compared_as_json(expected: object, written: str, is_right: bool) -> None:
    wanted = Call(name="get_weather", arguments={"city": "Rome", "days": expected})
    assert grade(_exercise(calls=(wanted,)), _with_value(written)) is is_right


def test_several_calls_have_to_come_in_order() -> None:
    invoke = CALL[CALL.index("<｜DSML｜invoke") : CALL.index("</｜DSML｜tool_calls>")]
    both = CALL.replace(invoke, invoke + invoke.replace("Rome", "Oslo"))
    oslo = Call(name="get_weather", arguments={"city": "Oslo", "days": 2})
    assert grade(_exercise(calls=(ROME, oslo)), both)
    assert not grade(_exercise(calls=(oslo, ROME)), both)
    assert not grade(_exercise(calls=(ROME,)), both)
    assert not grade(_exercise(calls=(ROME, oslo)), CALL)


def test_output_is_taken_apart() -> None:
    answer = parse_output("Need data.</think>Checking." + CALL + EOS, thinking=True)
    assert answer == Answer(reasoning="Need data.", content="Checking.", calls=(ROME,))
    assert parse_output("Need data.", thinking=True) == Answer(reasoning="Need data.", content="", calls=())
    assert parse_output("Hi", thinking=False) == Answer(reasoning=None, content="Hi", calls=())


def test_scores_are_counted_per_lesson() -> None:
    suite = [_exercise(text="1"), _exercise(text="2"), _exercise(text="3")]
    scores = score(suite, [True, False, True])
    assert scores == {"lesson": LessonScore(right=2, total=3)}
    assert scores["lesson"].share == pytest.approx(2 / 3)


def test_a_broken_suite_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text(json.dumps({"name": "a"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"suite\.jsonl, line 1 is not an exercise"):
        load_suite(path)


def test_a_suite_names_each_exercise_once(tmp_path: Path) -> None:
    line = {
        "name": "a",
        "lesson": "sums",
        "kind": "direct",
        "thinking": False,
        "messages": [],
        "tools": [],
        "expected": {"text": "1"},
        "target": "1",
        "prompt_tokens": 3,
    }
    path = tmp_path / "suite.jsonl"
    path.write_text(2 * (json.dumps(line) + "\n"), encoding="utf-8")
    with pytest.raises(ValueError, match="twice"):
        load_suite(path)
