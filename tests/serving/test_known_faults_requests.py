"""Faults that other engines had at this place, by the numbers of the list of known faults.

Here 23, prompt rendering, 24, requests, and 25, abort and health, whose rest is in test_lifecycle.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import deepseek_recipe as recipe
import pytest
from in_process import InProcessEngine, InProcessServer, say
from scripted_engine import FOLDER, ScriptedEngine

from halocline.engine.tokenizer import Tokenizer
from halocline.serving.state import ServerConfig

OFF = {"type": "disabled"}
TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}},
}


def chat(inside: Any, said: str, **more: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": said}], "thinking": OFF, **more}
    return inside.post("/v1/chat/completions", body)


# ---- 23: prompt rendering ---------------------------------------------------------------------------------------


def tokens(inside: Any, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    return list(inside.post("/tokenize", {"messages": messages, **more}).json()["tokens"])


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_23_the_prompt_is_the_vendors_byte_for_byte(inside: Any, thinking: str) -> None:
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
        {"role": "user", "content": "3+3?"},
    ]
    ours = tokens(inside, messages, thinking={"type": thinking}, tools=[TOOL])
    encoding = recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_file(f"{FOLDER}/tokenizer.json"))
    function = TOOL["function"]
    expected = encoding.encode(
        recipe.Conversation(
            [
                recipe.SystemMessage("Be terse."),
                recipe.UserMessage("2+2?"),
                recipe.AssistantMessage("4", "easy" if thinking == "enabled" else None),
                recipe.UserMessage("3+3?"),
            ],
            thinking_mode=thinking == "enabled",
            reasoning_effort="low" if thinking == "enabled" else None,
            tools=[recipe.ToolDefinition(function["name"], None, function["parameters"])],
        )
    )
    assert ours == expected


def test_23_user_text_never_becomes_a_control_token(inside: Any) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    spelled = "".join(tokenizer.control_ids)
    plain = tokens(inside, [{"role": "user", "content": "x"}])
    for role in ("system", "user", "assistant", "tool"):
        message: dict[str, Any] = {"role": role, "content": spelled}
        messages = [{"role": "user", "content": "x"}]
        if role == "tool":
            made = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [made]}, {**message, "tool_call_id": "c"}]
        elif role == "assistant":
            messages += [message, {"role": "user", "content": "y"}]
        else:
            messages = [message, *messages]
        ids = tokens(inside, messages)
        control = [i for i in ids if i in set(tokenizer.control_ids.values())]
        assert len(control) <= len(plain) + 8
        assert tokenizer.control_id("<｜latest_reminder｜>") not in control
        assert tokenizer.decode(ids).count("<｜latest_reminder｜>") == 1


def test_23_one_bos(inside: Any) -> None:
    ids = tokens(inside, [{"role": "user", "content": "<｜begin▁of▁sentence｜>x"}])
    assert ids.count(0) == 1
    assert ids[0] == 0
    text = inside.post("/tokenize", {"prompt": "<｜begin▁of▁sentence｜>x"}).json()["tokens"]
    assert text.count(0) == 1
    assert text[0] == 0


def test_23_efforts_are_defined_and_unknown_ones_refused(inside: Any) -> None:
    said = [{"role": "user", "content": "x"}]
    prompts = {effort: tokens(inside, said, reasoning_effort=effort) for effort in ("low", "medium", "high", "max")}
    assert prompts["medium"] == prompts["high"]
    assert prompts["low"] == tokens(inside, said)
    assert len({tuple(prompt) for prompt in prompts.values()}) == 3
    answer = inside.post("/tokenize", {"messages": said, "reasoning_effort": "hgih"})
    assert answer.status == 400
    assert "did you mean high" in answer.json()["error"]["message"]


# ---- 24: requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1024]}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt[]"),
        ("/v1/completions", {"prompt": [2**31]}, "prompt[]"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"1024": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1024]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids[]"),
        ("/detokenize", {"tokens": [1024]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[]"),
    ],
)
def test_24_every_token_id_is_checked_at_both_bounds(inside: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = inside.post(path, {"model": "tiny", **body})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param
    edge = {"prompt": [0, 1023]} if "completions" in path else {"tokens": [0, 1023]}
    assert inside.post(path, {"model": "tiny", **edge}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_24_minus_infinity_is_valid_json(inside: Any, stream: bool) -> None:
    answer = chat(inside, say("abcdef"), logprobs=True, top_logprobs=5, stream=stream)

    def strict(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for piece in answer.body.decode().replace("data: ", "").split("\n\n"):
        if piece and piece != "[DONE]":
            json.loads(piece, parse_constant=strict)
    assert b"-9999.0" in answer.body


def test_24_a_seed_depends_on_nothing_but_the_request(inside: Any) -> None:
    """Alone, beside unseeded ones, and as one of several answers: drawn by a grammar, so the seed decides."""
    form = {"response_format": {"type": "regex", "regex": "[a-z]{12}"}}

    def ask(**more: Any) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "thinking": OFF, **form, **more}

    async def crowd() -> list[Any]:
        posts = [ask(seed=7), *[ask() for _ in range(6)], ask(seed=7), ask(seed=8)]
        return await asyncio.gather(*[inside.server.post("/v1/chat/completions", body) for body in posts])

    alone = inside.post("/v1/chat/completions", ask(seed=7)).json()["choices"][0]["message"]["content"]
    answers = [one.json()["choices"][0]["message"]["content"] for one in inside.run(crowd())]
    assert answers[0] == answers[7] == alone
    assert answers[8] != alone
    several = inside.post("/v1/chat/completions", ask(seed=7, n=3)).json()["choices"]
    assert several[0]["message"]["content"] == alone
    assert len({one["message"]["content"] for one in several}) == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("asked", [None, False, True])
def test_24_usage_in_streams(inside: Any, path: str, asked: bool | None) -> None:
    body: dict[str, Any] = {"model": "tiny", "stream": True}
    body.update({"prompt": say("x")} if "chat" not in path else {"messages": [{"role": "user", "content": say("x")}]})
    if asked is not None:
        body["stream_options"] = {"include_usage": asked}
    *events, done = inside.post(path, body).events()
    assert done == (None, "[DONE]")
    if asked:
        assert events[-1][1]["choices"] == []
        assert events[-1][1]["usage"]["completion_tokens"] > 0
        assert all(event["usage"] is None for _, event in events[:-1])
    else:
        assert all("usage" not in event for _, event in events)
        assert all(event["choices"] for _, event in events)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 0}, (200, "", "length")),
        ({"max_tokens": 0, "echo": True}, (200, "PROMPT", "length")),
        ({"max_tokens": None}, (200, "Hello!", "stop")),
        ({"max_tokens": None, "echo": True}, (200, "PROMPTHello!", "stop")),
        ({"max_tokens": 10**6}, (400, "max_tokens", None)),
        ({"max_tokens": 10**6, "echo": True}, (400, "max_tokens", None)),
    ],
)
def test_24_max_tokens_is_defined(inside: Any, body: dict[str, Any], expected: tuple[int, str, str | None]) -> None:
    answer = inside.post("/v1/completions", {"model": "tiny", "prompt": "PROMPT", **body})
    status, text, reason = expected
    assert answer.status == status
    if status == 200:
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)
    else:
        assert answer.json()["error"]["param"] == text


@pytest.mark.parametrize("field", ["best_of", "suffix"])
def test_24_what_is_not_done_is_refused(inside: Any, field: str) -> None:
    answer = inside.post("/v1/completions", {"model": "tiny", "prompt": "x", field: 2 if field == "best_of" else "y"})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["code"] == "unsupported_parameter"


# ---- 25: abort and health ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_25_work_stops_when_a_client_leaves(stream: bool) -> None:
    """Eight clients leave after three pieces: nothing runs and no page is held."""

    async def work() -> None:
        async with InProcessServer(ServerConfig(name="tiny"), InProcessEngine(ScriptedEngine(FOLDER))) as server:
            said = say("word ", repeat=3000)
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": said}],
                "stream": stream,
                "max_tokens": 7000,
            }
            await asyncio.gather(*[_leave_early(server, body) for _ in range(8)])
            await server.idle()

    asyncio.run(work())


async def _leave_early(server: InProcessServer, body: dict[str, Any]) -> None:
    """A client that goes away after three pieces, or, of a whole answer, once its work has begun."""
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    pieces = 0

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        if not body["stream"]:
            while server.engine.engine.report()["decode_tokens"] < 100:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal pieces
        pieces += message["type"] == "http.response.body"
        if pieces == 3:
            gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    await server.app(scope, receive, send)
    if not body["stream"]:
        assert pieces == 0, "nobody is there to be answered"


def test_25_health_is_red_when_the_engine_is_dead() -> None:
    async def work() -> list[Any]:
        async with InProcessServer() as server:
            server.engine.dead = True
            posted = await server.post("/v1/chat/completions", {"model": "tiny", "messages": []})
            return [(await server.get("/health")), (await server.get("/ready")), posted]

    health, ready, posted = asyncio.run(work())
    assert [health.status, ready.status, posted.status] == [503, 503, 503]
    assert health.json()["problem"]
