"""What is trained is, byte for byte and id for id, what a server would render."""

from __future__ import annotations

import json

import deepseek_recipe as recipe
import pytest

from halocline.engine.grading import Call, Exercise, grade
from halocline.training.data import Encoder
from halocline.training.item import Item, assistant, user
from halocline.training.lessons.registry import LESSONS
from halocline.training.render import encode_item, render_item, render_prompt

SAMPLE = [(lesson, split, index) for lesson in LESSONS for split in ("train", "held_out") for index in range(12)]


def _request(item: Item) -> recipe.ConversationRequest:
    """Convert the item as a server converts a client's chat request."""
    body = {
        "model": "graded",
        "messages": list(item.messages),
        "thinking": {"type": "enabled" if item.thinking else "disabled"},
    }
    if item.thinking:
        body["reasoning_effort"] = item.effort
    if item.tools:
        body["tools"] = list(item.tools)
    options = recipe.ConversionOptions().with_model_alias("graded", recipe.ModelVersion.DeepseekV4Pro)
    return recipe.ChatCompletionRequest(json.dumps(body)).convert(options)


@pytest.mark.parametrize(("lesson", "split", "index"), SAMPLE)
def test_prompt_equals_the_rendered_chat_request(encoder: Encoder, lesson: str, split: str, index: int) -> None:
    item = LESSONS[lesson](2, index, split)  # type: ignore[arg-type]
    conversation = _request(item).conversation
    served = recipe.DeepseekV4Encoding().render_conversation(conversation).prompt
    assert render_prompt(item) == served
    ids = encode_item(encoder.recipe, item, 1)
    prompt_ids = encoder.recipe.encode(conversation)
    assert ids[: len(prompt_ids)] == prompt_ids
    target = encoder.tokenizer.decode(ids[len(prompt_ids) :], skip_special_tokens=False)
    assert target == render_item(item).target
    assert target.endswith("<｜end▁of▁sentence｜>")


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_recipe_reads_the_target_as_the_reply(encoder: Encoder, lesson: str) -> None:
    tokenizer = recipe.Tokenizer.from_str(encoder.tokenizer.to_str())
    for index in range(12):
        item = LESSONS[lesson](4, index, "held_out")
        request = _request(item)
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "graded")
        processor = recipe.StreamProcessor(generator, request.parsing_options, tokenizer)
        response = recipe.ChatCompletionResponse("id", "graded", 0, 1, 0)
        ids = encoder.tokenizer.encode(render_item(item).target, add_special_tokens=False).ids
        pushed = processor.push(recipe.InferenceChunk.ready())
        for token in ids[:-1]:
            pushed += processor.push(recipe.InferenceChunk.tokens([token]))
        pushed += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        for chunk in [*pushed, *processor.finish()]:
            response.accumulate(chunk)
        message = json.loads(response.to_json())["choices"][0]["message"]
        assert message["content"] == item.reply["content"]
        assert message.get("reasoning_content") == item.reply.get("reasoning_content")
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
        wanted = item.reply.get("tool_calls", ())
        assert calls == [(one["function"]["name"], one["function"]["arguments"]) for one in wanted]


def test_known_prompt() -> None:
    item = Item(
        lesson="chat",
        kind="known",
        messages=(user("a"), assistant("b", "r"), user("c")),
        reply=assistant("d", "s"),
        keys=(),
        thinking=True,
    )
    rendered = render_item(item)
    assert rendered.prompt == (
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜><think>"
    )
    assert rendered.target == "s</think>d<｜end▁of▁sentence｜>"


def test_calls_without_tools_on_offer_are_refused() -> None:
    wrong = LESSONS["tools"](0, 1, "held_out")
    item = Item(lesson="tools", kind="wrong", messages=(user("x"),), reply=_called(wrong), keys=())
    with pytest.raises(ValueError, match="without offering any"):
        render_item(item)


def _called(item: Item) -> dict[str, object]:
    messages = [message for message in (*item.messages, item.reply) if message.get("tool_calls")]
    return messages[0]


@pytest.mark.parametrize("lesson", LESSONS)
def test_targets_are_marked_right_and_those_of_others_wrong(lesson: str) -> None:
    items = [LESSONS[lesson](6, index, "held_out") for index in range(30)]
    exercises = [_exercise(item) for item in items]
    targets = [render_item(item).target for item in items]
    assert all(map(grade, exercises, targets))
    for item, exercise in zip(items, exercises, strict=True):
        for other, target in zip(items, targets, strict=True):
            if other.thinking == item.thinking and other.expected() != item.expected():
                assert not grade(exercise, target)


def _exercise(item: Item) -> Exercise:
    expected = item.expected()
    return Exercise(
        name="x",
        lesson=item.lesson,
        kind=item.kind,
        messages=item.messages,
        tools=item.tools,
        thinking=item.thinking,
        expected_text=expected.get("text"),
        expected_calls=tuple(Call(**one) for one in expected.get("calls", ())),
        target="",
        prompt_tokens=1,
    )
