"""Tool calls through OpenAI's chat client: parallel, streamed, forced, strict, and a whole conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from in_process import say
from markup import call, calls
from test_openai_chat import OFF, TIME, WEATHER, chat


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_parallel_calls(openai_client: Any, stream: bool, thinking: bool) -> None:
    text = (
        ("Need both.</think>" if thinking else "")
        + "Looking."
        + calls(call("get_weather", city="Rome", days=2), call("get_time"))
    )
    answer = chat(openai_client, say(text), tools=[WEATHER, TIME], stream=stream, thinking=thinking)
    if stream:
        made: dict[int, dict[str, str]] = {}
        reasons, text = [], ""
        for chunk in answer:
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for part in choice.delta.tool_calls or ():
                one = made.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                one["id"] += part.id or ""
                one["name"] += part.function.name or ""
                one["arguments"] += part.function.arguments or ""
        found = [(one["name"], json.loads(one["arguments"])) for one in made.values()]
        ids = [one["id"] for one in made.values()]
        assert list(made) == [0, 1]
    else:
        message = answer.choices[0].message
        found = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]
        ids, reasons, text = [one.id for one in message.tool_calls], [answer.choices[0].finish_reason], message.content
        assert all(one.type == "function" for one in message.tool_calls)
    assert found == [("get_weather", {"city": "Rome", "days": 2}), ("get_time", {})]
    assert len(set(ids)) == 2
    assert reasons == ["tool_calls"]
    assert text == "Looking."


def test_stream_helper_collects_calls(openai_client: Any) -> None:
    with openai_client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": say(calls(call("get_weather", city="Oslo")))}],
        tools=[WEATHER],
        extra_body=OFF,
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            },
            {"get_time"},
        ),
    ],
)
def test_forced_calls(openai_client: Any, choice: Any, names: set[str], thinking: bool) -> None:
    """The script wants to chat; the grammar makes it call."""
    said = say("Mulling.</think>I would rather talk." if thinking else "I would rather talk.")
    answer = chat(
        openai_client, said, tools=[WEATHER, TIME], tool_choice=choice, thinking=thinking, max_tokens=2000, seed=3
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    for one in answer.choices[0].message.tool_calls:
        assert one.function.name in names
        json.loads(one.function.arguments)
    if thinking:
        assert answer.choices[0].message.reasoning_content == "Mulling."


def test_tool_choice_none_hides_the_tools(openai_client: Any) -> None:
    with_none = chat(openai_client, say("x"), tools=[WEATHER], tool_choice="none")
    without = chat(openai_client, say("x"))
    assert with_none.usage.prompt_tokens == without.usage.prompt_tokens
    assert with_none.choices[0].message.tool_calls is None


def test_one_call_when_parallel_calls_are_off(openai_client: Any) -> None:
    said = say(calls(call("get_weather", city="Rome"), call("get_time")))
    answer = chat(openai_client, said, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [one.function.name for one in answer.choices[0].message.tool_calls] == ["get_weather"]


def test_strict_tools_keep_to_the_schema(openai_client: Any) -> None:
    strict = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    said = say(calls(call("get_weather", town="Rome", days="many")))
    answer = chat(openai_client, said, tools=[strict], seed=1, max_tokens=4000)
    for one in answer.choices[0].message.tool_calls or ():
        arguments = json.loads(one.function.arguments)
        assert set(arguments) <= {"city", "days"}
        assert isinstance(arguments["city"], str)


def test_a_tool_conversation_round_trip(openai_client: Any) -> None:
    first = chat(openai_client, say(calls(call("get_weather", city="Rome"))), tools=[WEATHER])
    message = first.choices[0].message
    second = openai_client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "Weather?"},
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"},
            {"role": "user", "content": say("Sunny.")},
        ],
        tools=[WEATHER],
        extra_body=OFF,
    )
    assert second.choices[0].message.content == "Sunny."
