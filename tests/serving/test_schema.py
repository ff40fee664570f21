"""The dialect of the field tables: what it lets through, what it refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest

from halocline.serving.errors import ApiError
from halocline.serving.schema import (
    any_of,
    array,
    boolean,
    check,
    choice,
    free_object,
    integer,
    number,
    object_,
    refused,
    string,
    tagged,
)

BODY = object_(
    {
        "count": integer(1, 9),
        "share": number(0, 1),
        "name": string(least=1, most=5),
        "word": string(pattern=r"^[a-z]+$"),
        "kind": choice("red", "green"),
        "flag": boolean(),
        "list": array(integer(0, 3), least=1, most=3),
        "either": any_of(string(), array(string(most=3)), array(array(integer(0, 5)))),
        "inner": object_({"x": integer(0, 1)}, required=("x",)),
        "map": free_object(values=number(-1, 1), most=2),
        "item": tagged("type", {"a": object_({"v": integer(0, 1)}, required=("v",)), "b": refused("not here")}),
        "old": refused("gone", "none", 1),
    },
    required=("count",),
)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"share": 0},
        {"share": 1.0},
        {"name": "abcde"},
        {"word": "abc"},
        {"kind": "green"},
        {"flag": False},
        {"list": [0, 3, 1]},
        {"either": ""},
        {"either": []},
        {"either": ["abc"]},
        {"either": [[1, 2], []]},
        {"inner": {"x": 1}},
        {"map": {"anything": 0.5}},
        {"item": {"type": "a", "v": 1}},
        {"old": "none"},
        {"old": 1},
        {"old": None, "flag": None, "inner": None},
    ],
)
def test_let_through(more: dict[str, Any]) -> None:
    check(BODY, {"count": 5, **more})


@pytest.mark.parametrize(
    ("more", "path", "words"),
    [
        ({"count": 0}, "count", "from 1 to 9, not 0"),
        ({"count": 10**40}, "count", "not a number of that size"),
        ({"count": True}, "count", "a whole number, not true"),
        ({"count": 1.5}, "count", "a whole number"),
        ({"count": None}, "count", "is missing"),
        ({"share": "x"}, "share", "a number, not 'x'"),
        ({"share": 1.1}, "share", "from 0 to 1"),
        ({"share": float("nan")}, "share", "a number"),
        ({"name": ""}, "name", "must not be empty"),
        ({"name": "abcdef"}, "name", "at most 5 characters, not 6"),
        ({"name": ["a"]}, "name", "a text, not a list"),
        ({"word": "A"}, "word", "must match"),
        ({"word": "abc\n"}, "word", "must match"),
        ({"kind": "greeen"}, "kind", "did you mean green?"),
        ({"flag": 1}, "flag", "true or false, not 1"),
        ({"list": []}, "list", "at least 1 items"),
        ({"list": [1] * 4}, "list", "at most 3 items"),
        ({"list": [1, 7]}, "list[]", "from 0 to 3, not 7"),
        ({"list": [1, "x"]}, "list[1]", "a whole number"),
        ({"list": [1, True]}, "list[1]", "a whole number"),
        ({"either": 5}, "either", "a text or a list of texts or a list of lists, not 5"),
        ({"either": ["abcd"]}, "either[0]", "at most 3 characters"),
        ({"either": [[9]]}, "either[0][]", "from 0 to 5"),
        ({"inner": {}}, "inner.x", "is missing"),
        ({"inner": {"x": 0, "y": 1}}, "inner.y", "is not a known field"),
        ({"map": {"a": 2}}, "map.a", "from -1 to 1"),
        ({"map": {"a": 0, "b": 0, "c": 0}}, "map", "at most 2 fields"),
        ({"item": 5}, "item", "an object, not 5"),
        ({"item": {}}, "item.type", "is missing; it is one of a, b"),
        ({"item": {"type": "c"}}, "item.type", "must be one of a, b, not 'c'"),
        ({"item": {"type": []}}, "item.type", "must be one of a, b, not a list"),
        ({"item": {"type": "b"}}, "item", "is not supported: not here"),
        ({"old": "x"}, "old", "is not supported: gone"),
        ({"old": True}, "old", "is not supported: gone"),
        ({"cuont": 1}, "cuont", "is not a known field; did you mean count?"),
        ({"x" * 500: 1}, "x" * 80 + "...", "is not a known field"),
    ],
)
def test_refused(more: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        check(BODY, {"count": 5, **more})
    assert caught.value.status == 400
    assert caught.value.param == path
    assert words in caught.value.message
    assert caught.value.message.startswith(path)
    assert len(caught.value.message) < 400
