"""A chat turn's output in pieces of any size equals the whole; nothing is lost, control tokens are told by id."""

from __future__ import annotations

import json

import pytest

from halocline.engine.chat_stream import ChatStream

TOOL = {"type": "function", "function": {"name": "get_weather"}}
CALLS = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>"
)


def parse(prompter, ids, *, thinking=True, size=1, reason="stop", **options):
    prompt = prompter.chat([{"role": "user", "content": "u"}], thinking=thinking, tools=[TOOL])
    stream = ChatStream(prompter, prompt, **options)
    deltas = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    deltas.append(stream.finish(reason))
    assert "".join(delta.reasoning for delta in deltas) == stream.reasoning
    assert "".join(delta.content for delta in deltas) == stream.content
    return stream


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_answer_and_calls_are_split(prompter, released, size):
    ids = released.encode_with_control_tokens("Need data.</think>Checking." + CALLS)
    stream = parse(prompter, ids, size=size)
    assert stream.reasoning == "Need data."
    assert stream.content == "Checking."
    (call,) = stream.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome", "days": 2})
    assert call.id
    assert stream.called_tools
    assert stream.num_reasoning_tokens == len(released.encode("Need data."))


def test_without_thinking_all_is_answer(prompter, released):
    stream = parse(prompter, released.encode("4"), thinking=False)
    assert (stream.reasoning, stream.content, stream.tool_calls) == ("", "4", ())


def test_reasoning_that_never_ends_is_reasoning(prompter, released):
    stream = parse(prompter, released.encode("hm, hm"), reason="length")
    assert (stream.reasoning, stream.content) == ("hm, hm", "")


def test_spelled_markers_are_text(prompter, released):
    ids = [*released.encode("I write </think> here"), released.control_id("</think>"), *released.encode("b" + CALLS)]
    stream = parse(prompter, ids)
    assert stream.reasoning == "I write </think> here"
    assert stream.content == "b" + CALLS
    assert stream.tool_calls == ()
    assert not stream.called_tools


def test_a_cut_call_is_given_as_far_as_it_came(prompter, released):
    ids = released.encode_with_control_tokens("</think>" + CALLS[: CALLS.index("Rome") + 2])
    stream = parse(prompter, ids, reason="length")
    (call,) = stream.tool_calls
    assert call.arguments == '{"city": "Ro'
    assert not stream.called_tools


def of_bytes(released, text):
    of_byte = {released.token_bytes(i): i for i in range(3, 300) if len(released.token_bytes(i)) == 1}
    return [of_byte[bytes([byte])] for byte in text]


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize("thinking", [True, False])
def test_an_incomplete_character_at_the_end_is_not_lost(prompter, released, size, thinking):
    ids = of_bytes(released, "ab한글".encode()[:-1])
    stream = parse(prompter, ids, thinking=thinking, size=size, reason="length")
    assert (stream.reasoning if thinking else stream.content) == "ab한\ufffd"
    assert stream.num_reasoning_tokens == (len(ids) if thinking else 0)


def test_bytes_that_are_no_text_come_out_once(prompter, released):
    ids = of_bytes(released, b"a\xff\xfeb\xff")
    assert parse(prompter, ids, thinking=False).content == released.decode(ids) == "a\ufffd\ufffdb\ufffd"


def test_stop_strings_end_the_answer_and_not_the_reasoning(prompter, released):
    ids = released.encode_with_control_tokens("a WXYZ b</think>one WXYZ two" + CALLS)
    stream = parse(prompter, ids, stop=["XYZ"])
    assert stream.reasoning == "a WXYZ b"
    assert (stream.content, stream.stop_found, stream.tool_calls) == ("one W", "XYZ", ())
    assert stream.num_tokens < len(ids)


def test_text_held_back_for_a_stop_string_comes_before_a_call_and_at_the_end(prompter, released):
    ids = released.encode_with_control_tokens("</think>see WX" + CALLS)
    stream = parse(prompter, ids, stop=["WXYZ"])
    assert (stream.content, len(stream.tool_calls)) == ("see WX", 1)
    assert parse(prompter, released.encode("see WX"), thinking=False, stop=["WXYZ"]).content == "see WX"


def test_a_required_call_starts_inside_the_block(prompter, released):
    prompt = prompter.chat([{"role": "user", "content": "u"}], thinking=False, tools=[TOOL], tool_choice="required")
    stream = ChatStream(prompter, prompt)
    stream.push(released.encode_with_control_tokens(CALLS.removeprefix("\n\n<｜DSML｜tool_calls>\n")))
    stream.finish("stop")
    assert [call.name for call in stream.tool_calls] == ["get_weather"]
    assert stream.content == ""
