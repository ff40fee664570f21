"""Structured output: whatever the model would rather say, the answer keeps to its schema.

The scripted engine draws from the allowed tokens by the request's seed, so every answer is made by the grammar alone.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import jsonschema
import pytest
from in_process import say
from markup import call, calls


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
        **more,
    }


# Every value is bounded: a model that loses its way in the digits of a fraction would never end, form or no form.
WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SHORT = {"type": "string", "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    obj({"a": {"type": "integer", "minimum": 0, "maximum": 99}}),
    obj({"a": {"type": "boolean"}, "b": {"type": "null"}}),
    obj({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    obj({"tags": {"type": "array", "items": WORD, "maxItems": 3}}),
    obj(
        {
            "pair": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 2,
                "maxItems": 2,
            }
        }
    ),
    obj({"kind": {"enum": ["red", "green", "blue"]}}),
    obj({"kind": {"const": "fixed"}, "n": {"enum": [1, 2, None, True]}}),
    obj({"inner": obj({"x": {"type": "integer", "minimum": -5, "maximum": 5}, "y": {"type": "boolean"}})}),
    obj({"either": {"anyOf": [{"type": "boolean"}, WORD]}}),
    obj({"one": {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 7}]}}),
    obj({"date": {"type": "string", "format": "date"}}),
    obj({"code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}}),
    obj({"a": WORD, "b": WORD, "c": WORD}, "a"),
    obj({"list": {"type": "array", "items": obj({"k": WORD, "v": {"type": "boolean"}}), "maxItems": 2}}),
    obj(
        {"p": {"$ref": "#/$defs/Point"}},
        **{"$defs": {"Point": obj({"x": {"type": "boolean"}, "y": {"type": "boolean"}})}},
    ),
    obj(
        {"left": {"$ref": "#/definitions/L"}}, **{"definitions": {"L": {"type": "array", "items": WORD, "maxItems": 2}}}
    ),
    obj({"n": {"type": ["integer", "null"], "minimum": 0, "maximum": 1}}),
    obj({"안녕": WORD, "naïve": {"type": "boolean"}}),
    obj({"empty": {"type": "string", "maxLength": 0}}),
    obj({"long": {"type": "string", "minLength": 3, "maxLength": 6}}),
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "boolean"},
    {"enum": ["yes", "no"]},
    {"type": "integer", "minimum": 10, "maximum": 20},
    WORD,
    {"anyOf": [obj({"ok": {"const": True}}), obj({"error": WORD})]},
    obj(
        {
            "matrix": {
                "type": "array",
                "maxItems": 2,
                "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
            }
        }
    ),
    obj({"m": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}}),
    obj({"id": {"type": "string", "format": "uuid"}}),
    obj({"deep": obj({"deeper": obj({"deepest": obj({"x": {"type": "boolean"}})})})}),
]


def nested(depth: int) -> dict[str, Any]:
    """A schema within a schema within a schema."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def content_of(answer: Any, stream: bool) -> tuple[str, str, str]:
    """Reasoning, answer and finish reason."""
    assert answer.status == 200, answer.body
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"].get("reasoning_content") or "", choice["message"]["content"], choice["finish_reason"]
    reasoning = text = reason = ""
    for _, event in answer.events()[:-1]:
        choice = event["choices"][0]
        reasoning += choice["delta"].get("reasoning_content") or ""
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
    return reasoning, text, reason


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_every_answer_validates(inside: Any, index: int) -> None:
    """Eight answers to each of 30 schemas: streamed or whole, thinking on or off, at T = 0 and T = 1."""
    assert len(SCHEMAS) == 30
    schema = SCHEMAS[index]
    for number in range(8):
        stream, thinks, cold = bool(number & 1), bool(number & 2), bool(number & 4)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": say(("Hm.</think>" if thinks else "") + "I would rather not.")}],
            "thinking": {"type": "enabled" if thinks else "disabled"},
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            "temperature": 0 if cold else 1,
            "seed": number,
            "stream": stream,
            "max_tokens": 3000,
        }
        reasoning, text, reason = content_of(inside.post("/v1/chat/completions", body), stream)
        assert reason == "stop", (schema, text[-200:])
        assert reasoning == ("Hm." if thinks else "")
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_json_object_is_an_object(inside: Any) -> None:
    for seed in range(10):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": say("no")}],
            "thinking": {"type": "disabled"},
            "response_format": {"type": "json_object"},
            "seed": seed,
            "max_tokens": 6000,
        }
        _, text, reason = content_of(inside.post("/v1/chat/completions", body), False)
        assert reason == "stop"
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("regex", ["[0-9]{3}", "(cat|dog)s?", "a*b+", r"\d{4}-\d{2}", "한[가-힣]{1,3}", ".{5}", "x?"])
def test_regex(inside: Any, regex: str) -> None:
    for seed in range(4):
        body = {
            "model": "tiny",
            "prompt": say("no"),
            "response_format": {"type": "regex", "regex": regex},
            "seed": seed,
            "max_tokens": 400,
        }
        choice = inside.post("/v1/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(regex, choice["text"], re.DOTALL if regex == ".{5}" else 0), choice["text"]


def test_choice(inside: Any) -> None:
    choices = ["yes", "yes, but", 'say "no"', "아니요", "back\\slash", "two\nlines"]
    seen = set()
    for seed in range(40):
        body = {
            "model": "tiny",
            "prompt": say("maybe"),
            "response_format": {"type": "choice", "choices": choices},
            "seed": seed,
            "max_tokens": 50,
        }
        seen.add(inside.post("/v1/completions", body).json()["choices"][0]["text"])
    assert seen <= set(choices)
    assert len(seen) >= 4


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}, "cannot be enforced"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}, "cannot be enforced"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}, "cannot be enforced"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}},
            "uniqueItems",
        ),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "is missing"),
        ({"type": "regex", "regex": "(unclosed"}, "cannot be enforced"),
        ({"type": "regex", "regex": "a(?=b)"}, "cannot be enforced"),
        ({"type": "regex", "regex": ""}, "must not be empty"),
        ({"type": "regex", "regex": "(" * 20_000 + "a" + ")" * 20_000}, "cannot be enforced"),
        ({"type": "regex", "regex": "(a|b|c)*" * 3000}, "cannot be enforced"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": nested(400)}}, "nesting depth"),
        ({"type": "choice", "choices": []}, "at least 1"),
        ({"type": "yaml"}, "must be one of"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused(inside: Any, form: dict[str, Any], words: str, stream: bool) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "response_format": form, "stream": stream}
    answer = inside.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("response_format")


def test_other_requests_are_answered_while_a_large_grammar_compiles(live: Any) -> None:
    """The grammar is made beside the steps and beside the event loop of the HTTP side."""
    import openai

    words = [
        {"type": "string", "pattern": f"^([a-z]{{1,{40 + i % 60}}}[0-9]{{1,{30 + i % 50}}})+x{i}$"} for i in range(400)
    ]
    schema = obj({f"field_{i}": obj({f"x{j}": words[(i * 7 + j) % 400] for j in range(12)}) for i in range(250)})

    async def work() -> tuple[float, float, int]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=120) as client:

            async def heavy() -> float:
                begun = time.monotonic()
                await client.completions.create(
                    model="tiny",
                    prompt="x",
                    max_tokens=1,
                    extra_body={
                        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                    },
                )
                return time.monotonic() - begun

            task = asyncio.create_task(heavy())
            slowest, count = 0.0, 0
            while not task.done():
                begun = time.monotonic()
                await client.completions.create(model="tiny", prompt=say("ok"), max_tokens=5)
                slowest, count = max(slowest, time.monotonic() - begun), count + 1
            return await task, slowest, count

    heavy, slowest, count = asyncio.run(work())
    assert count >= 3, f"the grammar took {heavy:.2f} s; no request was answered beside it"
    assert slowest < heavy


def test_a_form_and_tools_together(inside: Any) -> None:
    """With both, the answer is either the form or a call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": obj({"a": {"type": "boolean"}})}}
    for said, reason in ((calls(call("f")), "tool_calls"), ('{"a":true}', "stop")):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": say(said)}],
            "tools": [tool],
            "response_format": form,
            "thinking": {"type": "disabled"},
        }
        choice = inside.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == reason
