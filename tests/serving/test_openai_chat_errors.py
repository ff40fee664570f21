"""What OpenAI's chat client gets when something is wrong."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from in_process import say
from test_openai_chat import OFF, WEATHER, chat


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 9}, "presence_penalty"),
        ({"frequency_penalty": -9}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"seed": 2**70}, "seed"),
        ({"seed": "one"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice.function.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "response_format",
        ),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"extra": {"response_format": {"type": "regex", "regex": "("}}}, "response_format"),
        ({"extra": {"no_such_field": 1}}, "no_such_field"),
        ({"extra": {"top_k": -2}}, "top_k"),
        ({"extra": {"min_p": 1}}, "min_p"),
        ({"extra": {"min_tokens": 5, "stop": "x"}}, "min_tokens"),
        ({"extra": {"stop_token_ids": [99999]}}, "stop_token_ids"),
        ({"extra": {"reasoning_effort": "high"}}, "reasoning_effort"),
    ],
)
def test_bad_fields_are_named(openai_client: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(openai_client, say("x"), **more)
    assert caught.value.param == param
    assert re.split(r"[.\[]", param)[0] in caught.value.message
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "poet", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": "bob"}], "messages[0].name"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "system", "content": "x"}], "messages"),
        ([{"role": "tool", "tool_call_id": "q", "content": "x"}], "messages"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "messages"),
        ([{"role": "user", "content": "word " * 9000}], "messages"),
    ],
)
def test_bad_messages_are_named(openai_client: Any, messages: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model="tiny", messages=messages, extra_body=OFF)
    assert caught.value.param == param


def test_another_model_is_not_found(openai_client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_generation_says_nothing_of_the_machine(openai_client: Any, stream: bool) -> None:
    said = say("some words that come", fail=2)
    with pytest.raises(openai.APIError) as caught:
        list(chat(openai_client, said, stream=stream))
    assert "secret" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_abort_ends_a_stream(openai_client: Any, live: Any) -> None:
    stream = chat(openai_client, say("word ", repeat=4000, wait=0), stream=True, max_tokens=7000)
    first = next(iter(stream))
    answer = openai_client.post("/../abort", body={"request_id": first.id}, cast_to=dict)
    assert answer == {"aborted": 1}
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
