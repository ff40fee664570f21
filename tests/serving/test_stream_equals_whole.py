"""Streamed and whole answers are equal, however the text is cut into tokens and the tokens into steps."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import say
from markup import MARK, call, calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]


# ---- the pieces of an answer: Hangul and joined emoji, stop strings, markup, what looks like markup -------------

WORDS = st.sampled_from(
    [
        "Hi",
        " there",
        "\n",
        "\n\n",
        "안녕하세요",
        "👨‍👩‍👧‍👦",
        "é",
        "<",
        "</",
        "<b>",
        "2>&1",
        "</div>",
        "STOP",
        "ST",
        "OP",
        "｜",
        "DSML",
    ]
)
TEXTS = st.lists(WORDS, max_size=6).map("".join)
VALUES = st.one_of(TEXTS, st.integers(-5, 5), st.booleans(), st.lists(st.integers(0, 9), max_size=3))
CALLS = st.builds(lambda q, n: call("lookup", q=q, n=n), TEXTS, VALUES)


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, Any]:
    """A whole output cut into pieces (each tokenised alone) and steps."""
    reasoning = draw(st.one_of(st.none(), TEXTS))
    text = draw(TEXTS)
    made = draw(st.lists(CALLS, max_size=3))
    whole = text + (calls(*made) if made else "")
    if draw(st.booleans()):  # cut anywhere
        whole = whole[: draw(st.integers(0, len(whole)))]
    pieces = _cut(draw, whole)
    if reasoning is not None:
        pieces = [*_cut(draw, reasoning), "</think>", *pieces] if draw(st.booleans()) else _cut(draw, reasoning)
    return {
        "pieces": pieces,
        "per_step": draw(st.integers(1, 5)),
        "thinks": reasoning is not None,
        "max_tokens": draw(st.one_of(st.none(), st.integers(1, 40))),
        "stop": draw(st.sampled_from([None, "STOP", ["OP", "S"]])),
        "logprobs": draw(st.booleans()),
    }


def _cut(draw: st.DrawFn, text: str) -> list[str]:
    """Cuts that leave control tokens whole; between them anything goes."""
    pieces = []
    for index, part in enumerate(text.split(MARK)):
        if index:
            pieces.append(MARK)
        places = sorted(draw(st.sets(st.integers(0, len(part)), max_size=4)))
        edges = [0, *places, len(part)]
        pieces += [part[a:b] for a, b in itertools.pairwise(edges) if b > a]
    return pieces


def both(inside: Any, path: str, body: dict[str, Any]) -> tuple[Any, list[tuple[str | None, Any]]]:
    """The whole answer and the events of the same call."""
    whole = inside.post(path, body)
    stream = inside.post(path, {**body, "stream": True})
    assert whole.status == stream.status == 200, (whole.body, stream.body)
    return whole.json(), stream.events()


def joined_chat(events: list[tuple[str | None, Any]]) -> dict[int, dict[str, Any]]:
    """Choices added up by hand, as a client would."""
    choices: dict[int, dict[str, Any]] = {}
    assert events[-1][1] == "[DONE]"
    for _, event in events[:-1]:
        for choice in event["choices"]:
            so_far = choices.setdefault(
                choice["index"],
                {"content": "", "reasoning_content": "", "tool_calls": {}, "finish_reason": None, "logprobs": {}},
            )
            assert so_far["finish_reason"] is None, "nothing follows the finish reason"
            delta = choice["delta"]
            so_far["content"] += delta.get("content") or ""
            so_far["reasoning_content"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or ():
                made = so_far["tool_calls"].setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                made["id"] += part.get("id") or ""
                made["name"] += part["function"].get("name") or ""
                made["arguments"] += part["function"].get("arguments") or ""
            for name, entries in (choice["logprobs"] or {}).items():
                so_far["logprobs"].setdefault(name, []).extend(entries)
            so_far["finish_reason"] = choice["finish_reason"]
    return choices


@given(script=scripts())
@settings(max_examples=120, deadline=None)
def test_chat(inside: Any, script: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": say(pieces=script["pieces"], per_step=script["per_step"])}],
        "tools": TOOLS,
        "thinking": {"type": "enabled" if script["thinks"] else "disabled"},
        "seed": 1,
    }
    for name in ("max_tokens", "stop"):
        if script[name] is not None:
            body[name] = script[name]
    if script["logprobs"]:
        body.update(logprobs=True, top_logprobs=2)
    whole, events = both(inside, "/v1/chat/completions", body)
    [choice] = joined_chat(events).values()
    message = whole["choices"][0]["message"]
    assert choice["content"] == (message["content"] or "")
    assert choice["reasoning_content"] == (message.get("reasoning_content") or "")
    assert choice["finish_reason"] == whole["choices"][0]["finish_reason"]
    made = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()]
    assert [(one["name"], one["arguments"]) for one in choice["tool_calls"].values()] == made
    assert list(choice["tool_calls"]) == list(range(len(made)))
    stated = whole["choices"][0]["logprobs"] or {}
    assert choice["logprobs"] == {name: entries for name, entries in stated.items() if entries}


@given(script=scripts(), cuts=st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_cut_into_tokens_and_steps_does_not_matter(inside: Any, script: dict[str, Any], cuts: list[int]) -> None:
    """The same text from other tokens gives the same answer."""
    text = "".join(script["pieces"])
    parts = text.split(MARK)
    again: list[str] = []
    for index, part in enumerate(parts):
        if index:
            again.append(MARK)
        for word in part.split("</think>"):
            edges = [0, *sorted({cut for cut in cuts if cut < len(word)}), len(word)]
            again += [word[a:b] for a, b in itertools.pairwise(edges) if b > a]
            again.append("</think>")
        again.pop()
    body: dict[str, Any] = {
        "model": "tiny",
        "tools": TOOLS,
        "thinking": {"type": "enabled" if script["thinks"] else "disabled"},
        "stop": script["stop"],
    }

    said = [say(pieces=script["pieces"], per_step=script["per_step"]), say(pieces=again)]
    found = [
        inside.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": one}]}) for one in said
    ]
    first, second = (one.json()["choices"][0] for one in found)
    for choice in (first, second):
        for one in choice["message"].get("tool_calls") or ():
            one["id"] = ""
    assert first == second


@given(
    pieces=st.lists(WORDS, max_size=8), per_step=st.integers(1, 4), stop=st.sampled_from([None, "STOP", ["OP", "é"]])
)
@settings(max_examples=60, deadline=None)
def test_completions(inside: Any, pieces: list[str], per_step: int, stop: Any) -> None:
    body = {
        "model": "tiny",
        "prompt": [say(pieces=pieces, per_step=per_step), say("two")],
        "n": 2,
        "stop": stop,
        "max_tokens": 400,
        "logprobs": 1,
    }
    whole, events = both(inside, "/v1/completions", body)
    joined: dict[int, dict[str, Any]] = {}
    for _, event in events[:-1]:
        for choice in event["choices"]:
            so_far = joined.setdefault(choice["index"], {"text": "", "finish_reason": None, "tokens": []})
            so_far["text"] += choice["text"]
            so_far["tokens"] += choice["logprobs"]["tokens"]
            so_far["finish_reason"] = choice["finish_reason"]
    assert len(whole["choices"]) == 4
    for choice in whole["choices"]:
        mine = joined[choice["index"]]
        assert mine["text"] == choice["text"]
        assert mine["finish_reason"] == choice["finish_reason"]
        assert mine["tokens"] == choice["logprobs"]["tokens"]
    text = "".join(pieces)
    stops = [stop] if isinstance(stop, str) else stop or []
    ends = [text.find(one) + len(one) for one in stops if one in text]
    if ends:
        end = min(ends)
        text = text[: end - max(len(one) for one in stops if text[:end].endswith(one))]
    assert whole["choices"][0]["text"] == text


@given(script=scripts())
@settings(max_examples=40, deadline=None)
def test_responses(inside: Any, script: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "input": say(pieces=script["pieces"], per_step=script["per_step"]),
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
        "reasoning": {"effort": "low" if script["thinks"] else "none"},
        "include": ["reasoning.encrypted_content"],
    }
    if script["max_tokens"] is not None:
        body["max_output_tokens"] = script["max_tokens"]
    whole, events = both(inside, "/v1/responses", body)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    last = events[-1][1]["response"]
    finished = [event["item"] for _, event in events if event["type"] == "response.output_item.done"]
    for answer in (whole, last):
        for item in answer["output"]:
            item.pop("id"), item.pop("call_id", None)
    for item in finished:
        item.pop("id"), item.pop("call_id", None)
    assert whole["output"] == last["output"] == finished
    assert whole["status"] == last["status"]
    assert whole["usage"] == last["usage"]


@given(script=scripts())
@settings(max_examples=40, deadline=None)
def test_messages(inside: Any, script: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": script["max_tokens"] or 500,
        "messages": [{"role": "user", "content": say(pieces=script["pieces"], per_step=script["per_step"])}],
        "tools": [{"name": "lookup", "input_schema": TOOLS[0]["function"]["parameters"]}],
        "thinking": {"type": "adaptive" if script["thinks"] else "disabled"},
    }
    if script["stop"] is not None:
        body["stop_sequences"] = [script["stop"]] if isinstance(script["stop"], str) else script["stop"]
    whole, events = both(inside, "/v1/messages", body)
    blocks: list[dict[str, Any]] = []
    for name, event in events:
        assert name == event["type"]
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif name == "content_block_delta":
            delta = event["delta"]
            block = blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[
                    delta["type"]
                ]
                block[key] += delta[key]
    delta = next(event for name, event in events if name == "message_delta")
    assert delta["delta"]["stop_reason"] == whole["stop_reason"]
    assert delta["usage"] == whole["usage"]
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
    for mine, stated in zip(blocks, whole["content"], strict=True):
        if stated["type"] == "tool_use":
            assert mine["name"] == stated["name"]
            if whole["stop_reason"] == "tool_use" and mine["json"]:
                assert json.loads(mine["json"]) == stated["input"]
        else:
            key = "text" if stated["type"] == "text" else "thinking"
            assert mine[key] == stated[key]


@pytest.mark.parametrize("text", ["안녕하세요", "👨‍👩‍👧‍👦", "né\u0301e", "a\ufffdb", "\ufffd\ufffd"])
def test_every_byte_is_a_piece(inside: Any, text: str) -> None:
    """Characters split at every byte, and a cut inside a character: the same in both, nothing lost before the cut."""
    from scripted_engine import FOLDER

    from halocline.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(FOLDER)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    data = text.encode()
    ids = [byte_ids[data[i : i + 1]] for i in range(len(data))]
    for length in range(1, len(ids) + 1):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": say(ids=ids[:length])}],
            "thinking": {"type": "disabled"},
        }
        whole, events = both(inside, "/v1/chat/completions", body)
        [choice] = joined_chat(events).values()
        expected = data[:length].decode("utf-8", "replace")
        assert choice["content"] == whole["choices"][0]["message"]["content"] == expected
