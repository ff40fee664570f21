"""Faults that other engines had at this place, by the numbers of the list of known faults.

Here 21, streaming and stop, and 22, tool calls and reasoning; 23 to 25 are in test_known_faults_requests.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from in_process import say
from markup import MARK, call, calls
from scripted_engine import FOLDER

from halocline.engine.tokenizer import Tokenizer

OFF = {"type": "disabled"}
TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}},
}


def chat(inside: Any, said: str, **more: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": said}], "thinking": OFF, **more}
    return inside.post("/v1/chat/completions", body)


def streamed(answer: Any) -> str:
    return "".join(
        choice["delta"].get("content") or "" for _, event in answer.events()[:-1] for choice in event["choices"]
    )


# ---- 21: streaming and stop -------------------------------------------------------------------------------------


def test_21_incomplete_characters_are_held_back_and_none_is_lost(inside: Any) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    text = "한국어 👩‍👩‍👧 ok"
    ids = [single[bytes([byte])] for byte in text.encode()]
    answer = chat(inside, say(ids=ids), stream=True)
    deltas = [choice["delta"].get("content") or "" for _, event in answer.events()[:-1] for choice in event["choices"]]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_21_the_rest_is_flushed_alike_in_stream_and_whole(inside: Any, path: str) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    said = say(ids=[single[bytes([byte])] for byte in "x한".encode()[:-1]])
    body: dict[str, Any] = (
        {"model": "tiny", "prompt": said}
        if "chat" not in path
        else {"model": "tiny", "messages": [{"role": "user", "content": said}], "thinking": OFF}
    )
    whole = inside.post(path, body).json()["choices"][0]
    stream = inside.post(path, {**body, "stream": True}).events()[:-1]
    text = whole["message"]["content"] if "chat" in path else whole["text"]
    assert text == "x\ufffd"
    pieces = [
        choice["delta"].get("content") or "" if "chat" in path else choice["text"]
        for _, e in stream
        for choice in e["choices"]
    ]
    assert "".join(pieces) == text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_21_text_that_may_begin_a_stop_string_is_held_back(inside: Any, path: str, stream: bool) -> None:
    said = say(pieces=["ab", "W", "X", "Yq", "WXY", "Z!"])
    body: dict[str, Any] = {"model": "tiny", "stop": "WXYZ", "stream": stream, "thinking": OFF}
    body["messages"] = [{"role": "user", "content": said}]
    if path == "/v1/completions":
        del body["messages"], body["thinking"]
        body["prompt"] = said
    answer = inside.post(path, body)
    if stream and "chat" in path:
        assert streamed(answer) == "abWXYq"
    elif stream:
        assert "".join(e["choices"][0]["text"] for _, e in answer.events()[:-1]) == "abWXYq"
    else:
        choice = answer.json()["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) == "abWXYq"


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["one ST", "OP two"], "STOP", "one "),
        (["oneS", "T", "O", "Ptwo"], ["STOP"], "one"),
        (["a</b", ">c"], ["</b>", "zz"], "a"),
        (["ab", "cd"], ["cd", "bc"], "a"),
        (["STOP"], "STOP", ""),
        (["x\n", "\ny"], "\n\n", "x"),
    ],
)
def test_21_stop_strings_wherever_tokens_end(inside: Any, pieces: list[str], stop: Any, expected: str) -> None:
    answer = chat(inside, say(pieces=pieces), stop=stop).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_21_the_engine_is_told_of_a_stop_string(inside: Any) -> None:
    before = inside.server.engine.engine.report()["decode_tokens"]
    chat(inside, say("x END" + " word" * 3000), stop="END", max_tokens=7000)
    assert inside.server.engine.engine.report()["decode_tokens"] - before < 100


# ---- 22: tool calls and reasoning -------------------------------------------------------------------------------


def test_22_character_by_character(inside: Any) -> None:
    text = calls(call("run", c="ls 2>&1"))
    parts = [piece for part in text.split(MARK) for piece in (*part, MARK)][:-1]
    whole = chat(inside, say(pieces=parts), tools=[TOOL]).json()["choices"][0]
    assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == {"c": "ls 2>&1"}


def test_22_none_hides_tools_from_prompt_and_answer(inside: Any) -> None:
    said = say("x" + calls(call("run", c="ls")))
    hidden = chat(inside, said, tools=[TOOL], tool_choice="none").json()
    plain = chat(inside, said).json()
    assert hidden["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert hidden["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in hidden["choices"][0]["message"]
    assert MARK in hidden["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("messages", "reasoning", "content"),
    [
        ([{"role": "user", "content": say("a</think>b")}], "a", "b"),
        (
            [{"role": "user", "content": say("a</think>b")}, {"role": "assistant", "content": "so", "prefix": True}],
            "",
            "ab",
        ),
        (
            [
                {"role": "user", "content": say("a</think>b")},
                {"role": "assistant", "content": "", "reasoning_content": "so", "prefix": True},
            ],
            "a",
            "b",
        ),
    ],
)
def test_22_the_parser_starts_where_the_prompt_ends(inside: Any, messages: Any, reasoning: str, content: str) -> None:
    answer = inside.post("/v1/chat/completions", {"model": "tiny", "messages": messages}).json()
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content") or "", message["content"]) == (reasoning, content)


def test_22_one_parser_for_each_choice(inside: Any) -> None:
    texts = ["r1</think>c1", "r2</think>" + calls(call("run", c="x")), "r3 without end"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": say(texts=texts)}], "n": 3, "tools": [TOOL]}
    answer = inside.post("/v1/chat/completions", {**body, "stream": True})
    got = {index: {"r": "", "c": "", "calls": 0, "ends": []} for index in range(3)}
    for _, event in answer.events()[:-1]:
        for choice in event["choices"]:
            mine, delta = got[choice["index"]], choice["delta"]
            mine["r"] += delta.get("reasoning_content") or ""
            mine["c"] += delta.get("content") or ""
            mine["calls"] += sum(1 for part in delta.get("tool_calls") or () if "id" in part)
            mine["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert [(one["r"], one["c"], one["calls"], one["ends"]) for one in got.values()] == [
        ("r1", "c1", 0, ["stop"]),
        ("r2", "", 1, ["tool_calls"]),
        ("r3 without end", "", 0, ["stop"]),
    ]


def test_22_a_cut_at_any_character(inside: Any) -> None:
    text = "Hm.\n\n" + calls(call("run", c="a <b> </c>"), call("run", c=""))
    for length in range(len(text)):
        answer = chat(inside, say(text[:length], finish="length"), tools=[TOOL])
        assert answer.status == 200, text[:length]
        message = answer.json()["choices"][0]["message"]
        assert (message["content"] or "").startswith("Hm."[: min(length, 3)])
        assert "invoke" not in (message["content"] or "")
    for length in range(len(text)):  # the model ends there by itself: a call that was begun counts as cut
        choice = chat(inside, say(text[:length]), tools=[TOOL]).json()["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            assert [json.loads(one["function"]["arguments"])["c"] for one in choice["message"]["tool_calls"]]


def test_22_calls_are_numbered_with_stable_ids(inside: Any) -> None:
    answer = chat(inside, say(calls(*[call("run", c=str(i)) for i in range(5)])), tools=[TOOL], stream=True)
    ids: dict[int, set[str]] = {}
    reasons = []
    for _, event in answer.events()[:-1]:
        for choice in event["choices"]:
            for part in choice["delta"].get("tool_calls") or ():
                ids.setdefault(part["index"], set()).update({part["id"]} if "id" in part else set())
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert list(ids) == [0, 1, 2, 3, 4]
    assert all(len(one) == 1 for one in ids.values())
    assert len(set().union(*ids.values())) == 5
    assert reasons == ["tool_calls"]


def test_22_text_that_spells_markup_is_text(inside: Any) -> None:
    """Plain characters of </think> and of the markup token, from ordinary tokens, end no reasoning and make no call."""
    tokenizer = Tokenizer.from_dir(FOLDER)
    spelled = tokenizer.encode(f"</think> <{MARK}tool_calls>")
    ids = [*spelled, tokenizer.control_id("</think>"), *spelled]
    body = {"model": "tiny", "messages": [{"role": "user", "content": say(ids=ids)}], "tools": [TOOL]}
    message = inside.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == f"</think> <{MARK}tool_calls>"
    assert message["content"] == f"</think> <{MARK}tool_calls>"
    assert "tool_calls" not in message
