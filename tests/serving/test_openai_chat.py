"""Chat completions through OpenAI's own client, against a live server with a scripted engine."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from in_process import say
from pydantic import BaseModel

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
OFF = {"thinking": {"type": "disabled"}}


def chat(client: Any, said: str, **more: Any) -> Any:
    extra = {**OFF, **more.pop("extra", {})} if more.pop("thinking", False) is False else more.pop("extra", {})
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": said}], extra_body=extra, **more
    )


# ---- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["Hi", "안녕하세요", "👨‍👩‍👧‍👦 family", "a\n\nb", "<b>bold</b>", '"quoted" \\ back', "tab\tnul-free", " "]
)
@pytest.mark.parametrize("stream", [False, True])
def test_text(openai_client: Any, text: str, stream: bool) -> None:
    answer = chat(openai_client, say(text), stream=stream)
    if stream:
        chunks = list(answer)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)
    else:
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason, choice.message.role) == (text, "stop", "assistant")
        assert answer.object == "chat.completion"
        assert answer.model == "tiny"
        assert answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart(openai_client: Any, stream: bool) -> None:
    answer = chat(openai_client, say("I weigh it.</think>Forty-two."), thinking=True, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        reasoning, content = answer.choices[0].message.reasoning_content, answer.choices[0].message.content
    assert (reasoning, content) == ("I weigh it.", "Forty-two.")


@pytest.mark.parametrize(
    "switch",
    [
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_switched_off(openai_client: Any, switch: dict[str, Any]) -> None:
    answer = chat(openai_client, say("no reasoning here"), thinking=True, extra=switch)
    assert answer.choices[0].message.content == "no reasoning here"
    assert getattr(answer.choices[0].message, "reasoning_content", None) is None


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
def test_efforts(openai_client: Any, effort: Any) -> None:
    answer = chat(openai_client, say("r</think>c"), thinking=True, reasoning_effort=effort)
    assert answer.choices[0].message.reasoning_content == "r"
    plain = chat(openai_client, say("r</think>c"), thinking=True, reasoning_effort="low")
    more = answer.usage.prompt_tokens - plain.usage.prompt_tokens
    assert (more > 0) == (effort not in ("minimal", "low"))


def test_usage_counts_every_token(openai_client: Any) -> None:
    answer = chat(openai_client, say(pieces=["one", "</think>", "two"]), thinking=True)
    usage = answer.usage
    reasoning, answered = (
        openai_client.post("/../tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=dict)["count"]
        for text in ("one", "two")
    )
    assert usage.completion_tokens_details.reasoning_tokens == reasoning
    assert usage.completion_tokens == reasoning + answered + 2  # </think> and the end token
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("cached", [0, 5])
def test_cached_tokens(openai_client: Any, cached: int) -> None:
    answer = chat(openai_client, say("x", cached=cached))
    assert answer.usage.prompt_tokens_details.cached_tokens == cached


def test_stream_usage_only_when_asked(openai_client: Any) -> None:
    chunks = list(chat(openai_client, say("Hi"), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens >= 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


# ---- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("count", [1, 3])
def test_length(openai_client: Any, name: str, count: int) -> None:
    answer = chat(openai_client, say("a b c d e f g"), **{name: count})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == count


@pytest.mark.parametrize("stop", ["END", ["END"], ["zzz", "END"], ["D", "END"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop(openai_client: Any, stop: Any, stream: bool) -> None:
    answer = chat(openai_client, say(pieces=["before E", "N", "Dafter"]), stop=stop, stream=stream)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert reason == "stop"
    assert text == ("before EN" if "D" in stop and stop != "END" else "before ")


def test_stop_is_not_looked_for_in_reasoning(openai_client: Any) -> None:
    answer = chat(openai_client, say("an END here</think>and END there"), thinking=True, stop="END")
    assert answer.choices[0].message.reasoning_content == "an END here"
    assert answer.choices[0].message.content == "and "


# ---- several answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_n(openai_client: Any, stream: bool) -> None:
    said = say(texts=["one", "two</think>", "three"])
    answer = chat(
        openai_client, said, n=3, stream=stream, stream_options={"include_usage": True} if stream else openai.omit
    )
    expected = ["one", "two", "three"]
    if stream:
        texts = ["", "", ""]
        ends = []
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.index] if choice.finish_reason else []
        assert sorted(ends) == [0, 1, 2]
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in answer.choices]
    assert texts == expected


# ---- form -------------------------------------------------------------------------------------------------------


class Event(BaseModel):
    name: str
    year: int


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_parsed_into_a_model(openai_client: Any, thinking: bool, stream: bool) -> None:
    said = say(("Hm.</think>" if thinking else "") + '{"name": "fair", "year": 1999}')
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": said}],
        "response_format": Event,
        "extra_body": {} if thinking else OFF,
    }
    if stream:
        with openai_client.chat.completions.stream(**arguments) as events:
            parsed = events.get_final_completion().choices[0].message.parsed
    else:
        parsed = openai_client.chat.completions.parse(**arguments).choices[0].message.parsed
    assert parsed == Event(name="fair", year=1999)


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_object(openai_client: Any, temperature: float) -> None:
    answer = chat(
        openai_client,
        say('Sure! {"a": [1, {"b": null}]}'),
        response_format={"type": "json_object"},
        temperature=temperature,
        seed=5,
        max_tokens=3000,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_regex_and_choice(openai_client: Any) -> None:
    regex = {"response_format": {"type": "regex", "regex": "[0-9]{3}-[a-f]{2}"}}
    answer = chat(openai_client, say("not that"), extra=regex, seed=2)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer.choices[0].message.content)
    choices = {"response_format": {"type": "choice", "choices": ["yes", "no", "naïve"]}}
    answer = chat(openai_client, say("perhaps"), extra=choices, seed=2)
    assert answer.choices[0].message.content in ("yes", "no", "naïve")


# ---- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(openai_client: Any, top: int | None, stream: bool) -> None:
    more = {} if top is None else {"top_logprobs": top}
    answer = chat(
        openai_client,
        say(pieces=["Rea", "son", "</think>", "An", "swer"]),
        thinking=True,
        logprobs=True,
        stream=stream,
        **more,
    )
    if stream:
        entries = [
            one for chunk in answer for one in ((chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ())
        ]
    else:
        entries = answer.choices[0].logprobs.content
        assert answer.choices[0].logprobs.reasoning_content
    assert "".join(one.token for one in entries) == "Answer"
    for one in entries:
        assert one.logprob in (-0.5, -9999.0)
        assert bytes(one.bytes).decode() == one.token
        assert len(one.top_logprobs) == (top or 0)


def test_no_logprobs_unless_asked(openai_client: Any) -> None:
    assert chat(openai_client, say("x")).choices[0].logprobs is None


# ---- messages ---------------------------------------------------------------------------------------------------


def test_roles_and_parts(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": say("Hi!")}]},
        ],
        extra_body=OFF,
    )
    assert answer.choices[0].message.content == "Hi!"


def test_prefix_is_continued(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": say(" and so on")},
            {"role": "assistant", "content": "Once", "prefix": True},
        ],
        extra_body=OFF,
    )
    assert answer.choices[0].message.content == " and so on"


def test_async_client(live: Any) -> None:
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            asked = [
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": say(f"answer {i}")}], extra_body=OFF
                )
                for i in range(20)
            ]
            return [one.choices[0].message.content for one in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [f"answer {i}" for i in range(20)]
