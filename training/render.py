"""Rendering of exercises by the vendor's own recipe, so that training sees what serving sends."""

from __future__ import annotations

from typing import NamedTuple

import deepseek_recipe as recipe

from halocline.training.item import Item, Message, Tool

__all__ = ["Rendered", "conversation", "encode_item", "render_item", "render_prompt"]

EOS = "<｜end▁of▁sentence｜>"
ASSISTANT = "<｜Assistant｜>"


class Rendered(NamedTuple):
    """The text of a prompt and of the right output, end token included."""

    prompt: str
    target: str


def _message(message: Message) -> recipe.Message:
    role, content = message["role"], message["content"]
    if role == "system":
        return recipe.SystemMessage(content)
    if role == "user":
        return recipe.UserMessage(content)
    if role == "tool":
        return recipe.ToolMessage(content, message["tool_call_id"])
    calls = [
        recipe.ToolCall(one["id"], one["function"]["name"], one["function"]["arguments"])
        for one in message.get("tool_calls", ())
    ]
    return recipe.AssistantMessage(content, message.get("reasoning_content"), calls or None)


def _tool(tool: Tool) -> recipe.ToolDefinition:
    function = tool["function"]
    return recipe.ToolDefinition(function["name"], function.get("description"), function.get("parameters"))


def conversation(item: Item, *, with_reply: bool) -> recipe.Conversation:
    """Return the item as the recipe's conversation, with or without its reply."""
    messages = [_message(message) for message in item.messages]
    if with_reply:
        calls = item.reply.get("tool_calls")
        reply = item.reply
        # Without tools the recipe drops reasoning once a turn is over, so such a reply is rendered
        # as one that goes on. With tools it keeps it, and a prefix of calls alone would lack </think>.
        messages.append(
            _message(reply)
            if item.tools
            else recipe.AssistantMessage(reply["content"], reply.get("reasoning_content"), None, True)
        )
        if calls and not item.tools:
            raise ValueError(f"an item of lesson {item.lesson!r} calls tools without offering any")
    return recipe.Conversation(
        messages,
        thinking_mode=item.thinking,
        tools=[_tool(tool) for tool in item.tools],
        reasoning_effort=item.effort if item.thinking else None,
    )


def render_prompt(item: Item) -> str:
    """Return the prompt's text, as serving would render this request."""
    return recipe.DeepseekV4Encoding().render_conversation(conversation(item, with_reply=False)).prompt


def render_item(item: Item) -> Rendered:
    """Return prompt and target; their sum is the conversation as the recipe renders it."""
    prompt = render_prompt(item)
    whole = recipe.DeepseekV4Encoding().render_conversation(conversation(item, with_reply=True)).prompt
    if item.tools:
        whole = whole.removesuffix(ASSISTANT + ("<think>" if item.thinking else "</think>"))
    else:
        whole += EOS
    if not whole.startswith(prompt):
        raise ValueError(f"the recipe renders a {item.lesson} item differently once it is answered")
    return Rendered(prompt, whole[len(prompt) :])


def encode_item(encoding: recipe.DeepseekV4Encoding, item: Item, eos_id: int) -> list[int]:
    """Return the ids of the whole exercise, reply and end token included.

    Args:
        encoding: A recipe encoding with the tokenizer attached; it keeps control tokens that a
            user spelled out as plain text.
        item: The exercise.
        eos_id: The end token.
    """
    ids = encoding.encode(conversation(item, with_reply=True))
    return ids[:-2] if item.tools else [*ids, eos_id]
