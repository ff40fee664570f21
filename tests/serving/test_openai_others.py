"""Completions, responses and models through OpenAI's own client, against a live server with a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from in_process import say
from markup import call, calls
from pydantic import BaseModel
from test_openai_chat import Event

from halocline.engine.tokenizer import Tokenizer

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
FIND: dict[str, Any] = {"type": "function", "name": "find", "parameters": PARAMETERS, "strict": False}
NONE = {"effort": "none"}


# ---- completions ------------------------------------------------------------------------------------------------


def complete(client: Any, prompt: Any, **more: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **more)


@pytest.mark.parametrize("text", ["Hi", "안녕", "👩‍👧", " leading", "two\nlines"])
@pytest.mark.parametrize("stream", [False, True])
def test_completion(openai_client: Any, text: str, stream: bool) -> None:
    answer = complete(openai_client, say(text), stream=stream, max_tokens=100)
    if stream:
        chunks = list(answer)
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
        assert answer.object == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "e"])
def test_token_ids_as_answer(openai_client: Any, stream: bool, stop: str | None) -> None:
    """Each token is told when it is there, also one that is no text yet: the first of two bytes of a letter."""
    tokenizer = Tokenizer.from_dir(Path(__file__).parents[2] / "graded")
    byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xc3")
    ids = [byte, byte, *tokenizer.encode("abcde")]
    more = {"max_tokens": len(ids), "stream": stream, "stop": stop}
    answer = complete(openai_client, say(ids=ids), extra_body={"return_token_ids": True}, **more)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert [token for choice in choices for token in choice.token_ids] == ids
    assert "".join(choice.text for choice in choices) == "\ufffd\ufffdabcd" + ("" if stop else "e")
    assert not stream or choices[0].text == ""
    (plain,) = complete(openai_client, say(ids=ids), max_tokens=len(ids)).choices
    assert not hasattr(plain, "token_ids")


def test_sixteen_tokens_unless_asked(openai_client: Any) -> None:
    answer = complete(openai_client, say("word ", repeat=50))
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_answers(openai_client: Any, stream: bool) -> None:
    prompts = [say(texts=["a", "b"]), say(texts=["c", "d"]), say(texts=["e", "f"])]
    answer = complete(openai_client, prompts, n=2, stream=stream)
    if stream:
        texts = {index: "" for index in range(6)}
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        texts = {choice.index: choice.text for choice in answer.choices}
    assert texts == dict(enumerate("abcdef"))


def test_token_ids_as_prompt(openai_client: Any) -> None:
    ids = openai_client.post("/../tokenize", body={"prompt": say("from ids")}, cast_to=dict)["tokens"]
    assert complete(openai_client, ids).choices[0].text == "from ids"
    assert complete(openai_client, [ids, ids]).choices[1].text == "from ids"
    assert complete(openai_client, ids).usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("stop", ["END", ["x", "END"]])
def test_completion_stop(openai_client: Any, stop: Any) -> None:
    answer = complete(openai_client, say(pieces=["one E", "ND two"]), stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")


@pytest.mark.parametrize("count", [0, 2])
def test_completion_logprobs(openai_client: Any, count: int) -> None:
    answer = complete(openai_client, say(pieces=["ab", "c"]), logprobs=count)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == "abc"
    assert set(logprobs.token_logprobs) <= {-0.5, -9999.0}
    assert [len(top) for top in logprobs.top_logprobs] == [count] * len(logprobs.tokens)
    assert logprobs.text_offset[0] == 0


def test_echo_with_logprobs_and_no_tokens(openai_client: Any) -> None:
    """What evaluation harnesses ask to score a text."""
    answer = complete(openai_client, "some text to score", echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "some text to score"
    assert choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens
    assert choice.logprobs.text_offset[-1] < len(choice.text)
    assert answer.usage.completion_tokens == 0


def test_echo_comes_before_the_answer(openai_client: Any) -> None:
    prompt = say("!")
    assert complete(openai_client, prompt, echo=True).choices[0].text == prompt + "!"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"logprobs": 65}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt[]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 100}, "n"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "word " * 9000}, "prompt"),
    ],
)
def test_bad_completion_fields_are_named(openai_client: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(openai_client, more.pop("prompt", "x"), **more)
    assert caught.value.param == param


# ---- responses --------------------------------------------------------------------------------------------------


def respond(client: Any, given: Any, **more: Any) -> Any:
    return client.responses.create(model="tiny", input=given, reasoning=more.pop("reasoning", NONE), **more)


@pytest.mark.parametrize("text", ["Hi", "안녕", "two\n\nparts"])
def test_response(openai_client: Any, text: str) -> None:
    answer = respond(openai_client, say(text), metadata={"run": "7"}, instructions="Be brief.")
    assert answer.output_text == text
    assert answer.status == "completed"
    assert answer.metadata == {"run": "7"}
    assert answer.instructions == "Be brief."
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.output[0].role == "assistant"


def test_response_stream(openai_client: Any) -> None:
    with openai_client.responses.stream(
        model="tiny", input=say("r</think>Hello."), reasoning={"effort": "low"}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Hello."
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert final.usage.output_tokens_details.reasoning_tokens == 1


def test_response_reasoning_item_comes_back(openai_client: Any) -> None:
    """Reasoning returned in encrypted_content alone shapes the next prompt as the text itself does."""
    tools = [FIND]
    first = respond(
        openai_client,
        say("I must look.</think>" + calls(call("find", q="x"))),
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
        tools=tools,
    )
    items = [item.model_dump(exclude_none=True) for item in first.output]
    reasoning = next(item for item in items if item["type"] == "reasoning")
    made = next(item for item in items if item["type"] == "function_call")
    rest = [made, {"type": "function_call_output", "call_id": made["call_id"], "output": "found"}]
    question = {"role": "user", "content": "Find x."}
    bare = {key: value for key, value in reasoning.items() if key != "content"}
    text_only = {key: value for key, value in reasoning.items() if key != "encrypted_content"}
    nothing = {"type": "reasoning", "id": "r", "summary": []}
    sizes = [
        respond(openai_client, [question, item, *rest], reasoning={"effort": "low"}, tools=tools).usage.input_tokens
        for item in (bare, text_only, nothing)
    ]
    assert sizes[0] == sizes[1] > sizes[2]


def test_response_function_calls(openai_client: Any) -> None:
    answer = respond(openai_client, say("Let me see." + calls(call("find", q="a"), call("find", q="b"))), tools=[FIND])
    made = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in made] == [{"q": "a"}, {"q": "b"}]
    assert len({item.call_id for item in made}) == 2
    again = openai_client.responses.create(
        model="tiny",
        reasoning=NONE,
        tools=[FIND],
        input=[
            {"role": "user", "content": "Find."},
            *[item.model_dump(exclude_none=True) for item in answer.output],
            *[{"type": "function_call_output", "call_id": item.call_id, "output": "1"} for item in made],
            {"role": "user", "content": say("Both found.")},
        ],
    )
    assert again.output_text == "Both found."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "find"}])
def test_response_forced_call(openai_client: Any, choice: Any) -> None:
    answer = respond(openai_client, say("No."), tools=[FIND], tool_choice=choice, extra_body={"seed": 4})
    assert {item.type for item in answer.output} == {"function_call"}
    assert all("q" in json.loads(item.arguments) for item in answer.output)


def test_response_namespaced_tools(openai_client: Any) -> None:
    space = {"type": "namespace", "name": "files", "description": "Files.", "tools": [{**FIND, "name": "open"}]}
    answer = respond(openai_client, say(calls(call("files__open", q="a"))), tools=[space])
    [made] = answer.output
    assert (made.name, made.namespace) == ("open", "files")


def test_response_apply_patch(openai_client: Any) -> None:
    said = say(calls(call("apply_patch", input="*** Begin Patch\n*** End Patch")))
    answer = respond(openai_client, said, tools=[{"type": "custom", "name": "apply_patch"}])
    [made] = answer.output
    assert (made.type, made.name, made.input) == ("custom_tool_call", "apply_patch", "*** Begin Patch\n*** End Patch")


class Point(BaseModel):
    x: int
    y: int


@pytest.mark.parametrize("effort", ["none", "low"])
def test_response_parsed(openai_client: Any, effort: Any) -> None:
    said = say(("z</think>" if effort == "low" else "") + '{"x": 1, "y": -2}')
    answer = openai_client.responses.parse(model="tiny", input=said, reasoning={"effort": effort}, text_format=Point)
    assert answer.output_parsed == Point(x=1, y=-2)


def test_response_length(openai_client: Any) -> None:
    answer = respond(openai_client, say("a long answer"), max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 2


def test_response_logprobs(openai_client: Any) -> None:
    answer = respond(openai_client, say("ab"), include=["message.output_text.logprobs"], top_logprobs=2)
    entries = answer.output[0].content[0].logprobs
    assert "".join(one.token for one in entries) == "ab"
    assert [len(one.top_logprobs) for one in entries] == [2] * len(entries)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "bad name", "parameters": {}}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "q", "output": "x"}]}, "input"),
        ({"extra_body": {"nonsense": True}}, "nonsense"),
    ],
)
def test_bad_response_fields_are_named(openai_client: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(openai_client, more.pop("input", "x"), **more)
    assert caught.value.param == param


def test_a_failing_response(openai_client: Any) -> None:
    with pytest.raises(openai.APIError) as caught:
        respond(openai_client, say("some words", fail=2))
    assert "secret" not in str(caught.value)


def test_a_failing_response_stream(start_server: Any) -> None:
    """The protocol's error event, after which nothing comes."""
    server = start_server("--step-seconds", "0.1").wait_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    *before, last = list(respond(client, say("some words", fail=2), stream=True))
    assert [event.type for event in before][:2] == ["response.created", "response.in_progress"]
    assert last.type == "error"
    assert last.code == "generation_failed"
    assert last.sequence_number == len(before)
    assert "secret" not in last.message


# ---- models -----------------------------------------------------------------------------------------------------


def test_models(openai_client: Any) -> None:
    [model] = list(openai_client.models.list())
    assert model.id == "tiny"
    assert openai_client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("another")


def test_chat_model_also_parses_responses_events(openai_client: Any) -> None:
    """Both endpoints accept the same schema of a pydantic model."""
    said = say('{"name": "fair", "year": 3}')
    answer = openai_client.responses.parse(model="tiny", input=said, reasoning=NONE, text_format=Event)
    assert answer.output_parsed == Event(name="fair", year=3)
