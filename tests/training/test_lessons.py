"""The lessons: the same items every time, right answers, and nothing shared by the two parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from halocline.training.data import Encoder
from halocline.training.item import Item
from halocline.training.lessons.lookup import make_lookup_at
from halocline.training.lessons.prose import make_text
from halocline.training.lessons.registry import LESSONS
from halocline.training.lessons.sums import add_steps, multiply_steps, subtract_steps
from halocline.training.lessons.tool_family import TOOL_FAMILY
from halocline.training.render import render_item
from halocline.training.split import split_of

PLAIN_KEYS = {"chat:plain", "tool:none"}


def _items(lesson: str, split: str, count: int) -> list[Item]:
    return [LESSONS[lesson](3, index, split) for index in range(count)]  # type: ignore[arg-type]


def _first_question(item: Item) -> str:
    question: str = next(message["content"] for message in item.messages if message["role"] == "user")
    return question


def _answers(item: Item) -> list[tuple[str, str]]:
    """Return (question, answer) of every turn of a conversation without tools."""
    messages = [message for message in (*item.messages, item.reply) if message["role"] != "system"]
    return [(messages[i]["content"], messages[i + 1]["content"]) for i in range(0, len(messages), 2)]


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_an_item_depends_on_its_number_alone(lesson: str, split: str) -> None:
    forward = [LESSONS[lesson](7, index, split) for index in range(20)]  # type: ignore[arg-type]
    backward = [LESSONS[lesson](7, index, split) for index in reversed(range(20))]  # type: ignore[arg-type]
    assert forward == backward[::-1]
    assert LESSONS[lesson](8, 0, split) != forward[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("lesson", LESSONS)
def test_train_and_held_out_share_no_key_and_no_question(lesson: str) -> None:
    train, held_out = _items(lesson, "train", 1500), _items(lesson, "held_out", 300)
    train_keys = {key for item in train for key in item.keys}
    held_out_keys = {key for item in held_out for key in item.keys}
    assert train_keys.isdisjoint(held_out_keys)
    assert {split_of(key) for key in held_out_keys} == {"held_out"}
    assert {split_of(key) for key in train_keys - PLAIN_KEYS} == {"train"}
    assert {json.dumps(item.messages) for item in train}.isdisjoint(json.dumps(item.messages) for item in held_out)


def test_about_a_tenth_of_all_keys_is_held_out() -> None:
    share = sum(split_of(f"key {number}") == "held_out" for number in range(20_000)) / 20_000
    assert share == pytest.approx(0.1, abs=0.01)


def test_texts_of_the_two_parts_share_no_story() -> None:
    train = {line for index in range(300) for line in make_text(0, index, "train").split("\n")}
    held_out = {line for index in range(60) for line in make_text(0, index, "held_out").split("\n")}
    assert train.isdisjoint(held_out)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_sums_are_right(split: str) -> None:
    operations: dict[str, Callable[[int, int], int]] = {
        r"(?:What is )?(\d+)(?: ?\+ ?| plus )(\d+)\??|Add (\d+) and (\d+)\.": lambda a, b: a + b,
        r"(?:What is )?(\d+)(?: ?- ?| minus )(\d+)\??": lambda a, b: a - b,
        r"Take (\d+) from (\d+)\.": lambda b, a: a - b,
        r"(?:What is )?(\d+)(?:\*| times )(\d+)\??": lambda a, b: a * b,
        r"Which is larger, (\d+) or (\d+)\?": max,
    }
    seen = set()
    for item in _items("sums", split, 400):
        question = _first_question(item)
        [(pattern, match)] = [(p, m) for p in operations if (m := re.fullmatch(p, question))]
        seen.add(pattern)
        numbers = [int(group) for group in match.groups() if group]
        assert item.reply["content"] == str(operations[pattern](*numbers)), question
    assert seen == set(operations)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (7, 5), (999, 1), (247, 385), (5, 998), (100, 100)])
def test_every_written_step_of_a_sum_is_true_and_they_make_the_result(a: int, b: int) -> None:
    a, b = max(a, b), min(a, b)
    for steps, result in ((add_steps(a, b), a + b), (subtract_steps(a, b), a - b)):
        totals = []
        for step in steps.split(", "):
            terms, total = step.split("=")
            assert sum(int(term) for term in re.findall(r"-?\d+", terms)) == int(total)
            totals.append(int(total))
        digits = [total % 10 for total in totals[:-1]] + [totals[-1]]
        assert sum(digit * 10**place for place, digit in enumerate(digits)) == result


def test_a_product_is_written_as_repeated_addition() -> None:
    assert multiply_steps(7, 4) == "7+7=14, 14+7=21, 21+7=28"


def test_rows_are_copied_and_reversed() -> None:
    for item in _items("copying", "held_out", 200):
        ask, _, row = _first_question(item).partition(": ")
        words = row.split(" ")
        assert item.reply["content"].split(" ") == (words if ask == "Repeat" else words[::-1])


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_an_asked_fact_was_told_before_and_nothing_contradicts_it(split: str) -> None:
    for item in _items("facts", split, 200):
        told = _first_question(item)
        for question, answer in _answers(item):
            if answer == "Yes.":
                name, town = re.search(r"Does (\w+) live in (\w+)\?", question).groups()  # type: ignore[union-attr]
                assert f"{name} lives in {town}." in told
            else:
                assert answer.removeprefix("No. ") in told
        lines = [line for line in re.findall(r"[^.?]+\.", told)]
        subjects = [re.sub(r" \S+\.$", "", line) for line in lines if " has " not in line]
        assert len(set(subjects)) == len(subjects)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_asked_code_was_told_once_before_its_question(split: str) -> None:
    for item in _items("lookup", split, 120):
        told = ""
        for question, answer in _answers(item):
            told += question
            assert told.count(answer) == 1
            holder = re.search(r"What is the code of the (\w+ \w+)\?$", question).group(1)  # type: ignore[union-attr]
            assert answer.startswith(f"The code of the {holder} is ")


@pytest.mark.parametrize("distance", [200, 1200, 6000])
def test_a_code_is_told_at_the_wanted_distance(distance: int, encoder: Encoder) -> None:
    for index in range(3):
        item = make_lookup_at(1, index, "held_out", distance=distance)
        _, _, after = render_item(item).prompt.partition(item.reply["content"])
        between = len(encoder.tokenizer.encode(after, add_special_tokens=False).ids)
        assert between == pytest.approx(distance, rel=0.05, abs=40)


def test_tool_arguments_fit_their_schema_and_cover_every_json_type() -> None:
    types: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "array": (list,),
        "object": (dict,),
        "null": (type(None),),
    }
    kinds = {kind.name: kind for kind in TOOL_FAMILY}
    seen: set[type] = set()
    for item in _items("tools", "train", 600):
        offered = {tool["function"]["name"] for tool in item.tools}
        for message in (*item.messages, item.reply):
            for one in message.get("tool_calls", ()):
                name, arguments = one["function"]["name"], json.loads(one["function"]["arguments"])
                assert name in offered
                assert arguments.keys() == kinds[name].properties.keys()
                for key, value in arguments.items():
                    wanted = kinds[name].properties[key]["type"]
                    allowed = [t for each in ([wanted] if isinstance(wanted, str) else wanted) for t in types[each]]
                    assert type(value) in allowed
                    seen.add(type(value))
    assert seen == {str, int, float, bool, list, dict, type(None)}


def test_a_tool_answer_holds_what_the_tool_gave_back() -> None:
    for item in _items("tools", "held_out", 200):
        if item.kind != "result":
            continue
        for value in json.loads(item.messages[-1]["content"]).values():
            said = item.reply["content"]
            assert ("not" not in said.split()) is value if isinstance(value, bool) else str(value) in said


def test_a_plain_greeting_is_answered_honestly() -> None:
    plain = [item for item in _items("chat", "train", 400) if item.kind == "plain"]
    english = [item for item in plain if item.messages[0]["role"] != "system"]
    greeted = [item for item in english if item.messages[0]["content"].lower().startswith(("hello", "hi"))]
    assert greeted
    for item in greeted:
        assert _answers(item)[0][1] == "Hello! I am a small test model."


def test_system_texts_are_obeyed() -> None:
    for item in _items("chat", "held_out", 200):
        first = item.messages[0]
        if first["role"] != "system":
            continue
        word = re.search(r"with the word (\w+)\.", first["content"])
        for _, answer in _answers(item):
            if word:
                assert answer.endswith(f" {word.group(1)}")
            if "Answer in French." in first["content"]:
                assert "test model" not in answer


def test_system_texts_that_change_nothing_come_in_training_only() -> None:
    def with_system(split: str) -> int:
        return sum(item.messages[0]["role"] == "system" for item in _items("copying", split, 300))

    assert with_system("held_out") == 0
    assert 5 <= with_system("train") <= 60


def test_mixed_conversations_hold_several_lessons() -> None:
    for item in _items("mixed", "train", 60):
        assert len({key.split(":")[0] for key in item.keys}) >= 2
        assert len(_answers(item)) >= 2
