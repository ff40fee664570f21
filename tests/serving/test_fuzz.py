"""Bodies that nobody would send: none may crash the server, hang, or leave something behind."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest
from in_process import InProcessServer, say
from markup import call, calls

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
BASES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "r",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "1"},
                {"role": "user", "content": say("r</think>a" + calls(call("f", a=1)))},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "n": 2,
            "seed": 3,
            "stop": ["x", "y"],
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 60,
            "logit_bias": {"5": 1},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": say('{"a": 1}')}],
            "thinking": {"type": "disabled"},
            "max_tokens": 40,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            },
        },
    ),
    (
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": [say("a b c"), "x"],
            "n": 2,
            "max_tokens": 9,
            "echo": True,
            "logprobs": 1,
            "stop": "c",
        },
    ),
    ("/v1/completions", {"model": "tiny", "prompt": [[1, 2, 3], [4, 5]], "max_tokens": 5, "stream": True}),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "input": [
                {"role": "user", "content": "q"},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"role": "user", "content": [{"type": "input_text", "text": say("r</think>a")}]},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "max_output_tokens": 50,
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 50,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1", "is_error": True}],
                },
                {"role": "user", "content": say("r</think>a")},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 20},
            "stop_sequences": ["zz"],
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "q"}]}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/abort", {"request_id": "x"}),
]
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**40, 0.1, -0.0, 1e308),
    *("", " ", "\x00", "x" * 3000, "\U0001f600", "<｜User｜>", "</think>", "｜DSML｜", "\ufffd", "\U0001d4b3"),
    *([], {}, [[]], [{}], {"a": None}, {"": 1}, [None] * 50, ["x"] * 40, {"type": "object"}, {"type": []}),
    *("auto", "required", "text"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a body."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        found += places(one, (*path, key))
    return found


def mutated(rng: random.Random, body: dict[str, Any]) -> Any:
    """A body with one to three faults."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        where = rng.choice(places(body))
        parent = body
        for key in where[:-1]:
            parent = parent[key]
        kind = rng.randrange(5)
        if kind == 0 and isinstance(parent, dict):
            del parent[where[-1]]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(["", "x", "type", "role", "content", "n", "stream", "\x00", "é" * 50])] = copy.deepcopy(
                rng.choice(ODD)
            )
        elif kind == 2 and isinstance(parent, list):
            parent.append(copy.deepcopy(rng.choice(ODD)))
        elif kind == 3 and isinstance(parent, list):
            parent[:] = copy.deepcopy(parent) * rng.randint(0, 3)
        else:
            parent[where[-1]] = copy.deepcopy(rng.choice(ODD))
        if not body:
            return body
    return body


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a few of them changed, lost or doubled."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(3)
        if kind == 0:
            changed[place:place] = bytes([rng.randrange(256)])
        elif kind == 1:
            del changed[place : place + rng.randint(1, 20)]
        else:
            changed[place : place + 1] = rng.choice([b'"', b"{", b"}", b"\\u", b"\xff", b"\\ud800", b"1e999", b"null"])
    return bytes(changed)


async def fuzz(count: int, seed: int) -> dict[int, int]:
    """Sends bodies, eight at a time; returns how often each status came."""
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    async with InProcessServer() as server:
        baseline = len(asyncio.all_tasks())
        room = asyncio.Semaphore(8)

        async def send(path: str, data: bytes) -> None:
            async with room:
                answer = await asyncio.wait_for(server.post(path, data), 30)
            assert answer.status < 500, (path, data, answer.body)
            assert answer.status != 499
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            if answer.status != 200:
                stated = answer.json()["error"]
                assert stated["message"], (path, data)

        for _ in range(count // 100):
            batch = []
            for _ in range(100):
                path, base = rng.choice(BASES)
                data = json.dumps(mutated(rng, base)).encode()
                batch.append(send(path, damaged(rng, data) if rng.random() < 0.2 else data))
            await asyncio.gather(*batch)
        await server.idle()
        assert len(asyncio.all_tasks()) == baseline, "a task was left behind"
        assert server.engine.engine.report()["running"] == 0
    return statuses


@pytest.mark.parametrize(("path", "body"), BASES)
def test_the_bodies_are_good_before_they_are_spoilt(inside: Any, path: str, body: dict[str, Any]) -> None:
    assert inside.post(path, body).status == (404 if path == "/abort" else 200)


def test_a_thousand_bodies() -> None:
    statuses = asyncio.run(fuzz(1000, seed=1))
    assert sum(statuses.values()) == 1000
    assert statuses[200] > 50, "some faults are none, and then there is an answer"
    assert statuses[400] > 500


@pytest.mark.slow
def test_ten_thousand_bodies() -> None:
    statuses = asyncio.run(fuzz(10_000, seed=2))
    assert sum(statuses.values()) == 10_000
