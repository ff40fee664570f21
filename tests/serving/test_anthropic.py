"""Messages through Anthropic's own client, against a live server with a scripted engine."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from in_process import say
from markup import call, calls

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def ask(client: Any, said: Any, **more: Any) -> Any:
    messages = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return client.messages.create(model="tiny", max_tokens=more.pop("max_tokens", 2000), messages=messages, **more)


@pytest.mark.parametrize("text", ["Hi", "안녕하세요", "👨‍👩‍👧‍👦", "a\n\nb", "</div> & <b>"])
@pytest.mark.parametrize("stream", [False, True])
def test_text(anthropic_client: Any, text: str, stream: bool) -> None:
    if stream:
        with anthropic_client.messages.stream(
            model="tiny", max_tokens=200, messages=[{"role": "user", "content": say(text)}]
        ) as events:
            assert "".join(events.text_stream) == text
            message = events.get_final_message()
    else:
        message = ask(anthropic_client, say(text))
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == text
    assert (message.role, message.type, message.model, message.stop_reason) == (
        "assistant",
        "message",
        "tiny",
        "end_turn",
    )
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens >= 2


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
@pytest.mark.parametrize("stream", [False, True])
def test_thinking(anthropic_client: Any, thinking: Any, stream: bool) -> None:
    said = say("Let me weigh.</think>Heavy.")
    if stream:
        with anthropic_client.messages.stream(
            model="tiny", max_tokens=2000, messages=[{"role": "user", "content": said}], thinking=thinking
        ) as events:
            message = events.get_final_message()
    else:
        message = ask(anthropic_client, said, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Let me weigh.", "Heavy.")
    assert message.content[0].signature


def test_thinking_is_off_unless_asked(anthropic_client: Any) -> None:
    assert ask(anthropic_client, say("plain")).content[0].type == "text"


def test_the_budget_closes_the_reasoning(anthropic_client: Any) -> None:
    said = say(pieces=["word "] * 60 + ["</think>", "Done."])
    message = ask(anthropic_client, said, thinking={"type": "enabled", "budget_tokens": 10}, max_tokens=100)
    assert message.content[0].thinking.count("word") < 20
    free = ask(anthropic_client, said, thinking={"type": "enabled", "budget_tokens": 1999}, max_tokens=2000)
    assert free.content[0].thinking.count("word") == 60
    assert free.content[1].text == "Done."


@pytest.mark.parametrize("stream", [False, True])
def test_tool_use(anthropic_client: Any, stream: bool) -> None:
    said = say("Checking." + calls(call("get_weather", city="Rome"), call("get_weather", city="Oslo")))
    if stream:
        with anthropic_client.messages.stream(
            model="tiny", max_tokens=2000, messages=[{"role": "user", "content": said}], tools=[TOOL]
        ) as events:
            message = events.get_final_message()
    else:
        message = ask(anthropic_client, said, tools=[TOOL])
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in message.content[1:]] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({block.id for block in message.content[1:]}) == 2


def test_a_tool_conversation(anthropic_client: Any) -> None:
    first = ask(
        anthropic_client,
        say("Hm.</think>" + calls(call("get_weather", city="Rome"))),
        tools=[TOOL],
        thinking={"type": "adaptive"},
    )
    use = first.content[-1]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": [{"type": "text", "text": "sun"}],
                    "is_error": False,
                },
                {"type": "text", "text": say("Sunny.")},
            ],
        },
    ]
    assert ask(anthropic_client, messages, tools=[TOOL]).content[0].text == "Sunny."


def test_an_error_of_a_tool_reaches_the_model(anthropic_client: Any) -> None:
    def size(is_error: bool) -> int:
        messages = [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "R"}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "boom", "is_error": is_error}],
            },
        ]
        return anthropic_client.messages.count_tokens(model="tiny", messages=messages, tools=[TOOL]).input_tokens

    assert size(True) > size(False)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_forced_tool(anthropic_client: Any, choice: Any, thinking: Any) -> None:
    said = say("Hm.</think>No." if thinking["type"] == "adaptive" else "No.")
    message = ask(anthropic_client, said, tools=[TOOL], tool_choice=choice, thinking=thinking, extra_body={"seed": 2})
    assert message.stop_reason == "tool_use"
    assert all("city" in block.input for block in message.content if block.type == "tool_use")


def test_one_tool_use_when_parallel_is_off(anthropic_client: Any) -> None:
    said = say(calls(call("get_weather", city="Rome"), call("get_weather", city="Oslo")))
    message = ask(anthropic_client, said, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"city": "Rome"}]


def test_tool_choice_none(anthropic_client: Any) -> None:
    count = anthropic_client.messages.count_tokens
    hidden = count(
        model="tiny", messages=[{"role": "user", "content": "x"}], tools=[TOOL], tool_choice={"type": "none"}
    )
    assert hidden.input_tokens == count(model="tiny", messages=[{"role": "user", "content": "x"}]).input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(anthropic_client: Any, stream: bool) -> None:
    arguments = {"stop_sequences": ["END", "zz"]}
    if stream:
        with anthropic_client.messages.stream(
            model="tiny", max_tokens=200, messages=[{"role": "user", "content": say("one END two")}], **arguments
        ) as events:
            message = events.get_final_message()
    else:
        message = ask(anthropic_client, say("one END two"), **arguments)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "END", "one ")


def test_max_tokens(anthropic_client: Any) -> None:
    message = ask(anthropic_client, say("a b c d e"), max_tokens=2)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


def test_prefill_is_continued(anthropic_client: Any) -> None:
    messages = [{"role": "user", "content": say(" upon a time")}, {"role": "assistant", "content": "Once"}]
    message = ask(anthropic_client, messages)
    assert message.content[0].text == " upon a time"
    closed = anthropic_client.messages.count_tokens(
        model="tiny", messages=[*messages, {"role": "user", "content": "x"}]
    )
    open_ = anthropic_client.messages.count_tokens(model="tiny", messages=messages)
    assert open_.input_tokens < closed.input_tokens


def test_what_coding_agents_send(anthropic_client: Any) -> None:
    message = ask(
        anthropic_client,
        [{"role": "user", "content": [{"type": "text", "text": say("ok"), "cache_control": {"type": "ephemeral"}}]}],
        system=[{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "user_1_account__session_2"},
        extra_body={"temperature": 1},
        extra_headers={"anthropic-beta": "some-beta-2026-01-01"},
    )
    assert message.content[0].text == "ok"


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_effort(anthropic_client: Any, effort: Any) -> None:
    message = ask(anthropic_client, say("r</think>c"), thinking={"type": "adaptive"}, output_config={"effort": effort})
    assert message.content[1].text == "c"


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_output_format(anthropic_client: Any, thinking: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    said = say('x</think>Sure: {"ok": true}' if thinking["type"] == "adaptive" else 'Sure: {"ok": true}')
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = ask(anthropic_client, said, thinking=thinking, output_config=config, extra_body={"seed": 1})
    import json

    assert set(json.loads(message.content[-1].text)) == {"ok"}


def test_count_tokens(anthropic_client: Any) -> None:
    counted = anthropic_client.messages.count_tokens(
        model="tiny", messages=[{"role": "user", "content": say("x")}], system="s"
    )
    message = ask(anthropic_client, say("x"), system="s")
    assert counted.input_tokens == message.usage.input_tokens


def test_cached_tokens_are_apart(anthropic_client: Any) -> None:
    usage = ask(anthropic_client, say("x", cached=4)).usage
    plain = ask(anthropic_client, say("x", cached=0)).usage
    assert usage.cache_read_input_tokens == 4
    assert usage.input_tokens + 4 == plain.input_tokens


def test_models(anthropic_client: Any) -> None:
    listed = anthropic_client.models.list()
    assert [model.id for model in listed.data] == ["tiny"]
    assert anthropic_client.models.retrieve("tiny").type == "model"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "name": "bad name"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice.name"),
        ({"extra_body": {"temperature": 7}}, "temperature"),
        ({"extra_body": {"top_k": "x"}}, "top_k"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "output_config.format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "q", "content": "x"}]}]},
            "messages",
        ),
        ({"service_tier": "fast"}, "service_tier"),
    ],
)
def test_bad_fields_are_named(anthropic_client: Any, more: dict[str, Any], word: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(anthropic_client, more.pop("messages", "x"), **more)
    body = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(word)


def test_another_model_is_not_found(anthropic_client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="claude-9", max_tokens=5, messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_generation(anthropic_client: Any, stream: bool) -> None:
    with pytest.raises(anthropic.APIError) as caught:
        list(ask(anthropic_client, say("some words", fail=2), stream=stream))
    assert "secret" not in str(caught.value)


def test_refused_beta_fields(anthropic_client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        anthropic_client.beta.messages.create(
            model="tiny",
            max_tokens=5,
            messages=[{"role": "user", "content": "x"}],
            mcp_servers=[{"type": "url", "url": "https://x", "name": "x"}],
        )
