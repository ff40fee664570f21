"""One exercise: a conversation, the reply that is right, and how to say so in data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Effort", "Item", "Message", "Tool", "assistant", "call", "system", "tool_result", "user"]

Message = dict[str, Any]
Tool = dict[str, Any]
Effort = Literal["low", "high", "max"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A conversation up to the question, and its right reply.

    `messages` and `tools` are in the form of OpenAI's chat requests, so that they can be posted to
    a server as they stand. `reply` is an assistant message with `reasoning_content` (when
    thinking), `content` and `tool_calls`. `keys` are the canonical names of what the item teaches.
    """

    lesson: str
    kind: str
    messages: tuple[Message, ...]
    reply: Message
    keys: tuple[str, ...]
    thinking: bool = False
    effort: Effort = "low"
    tools: tuple[Tool, ...] = ()

    def expected(self) -> dict[str, Any]:
        """Return what grading compares: the answer's text, or the calls with parsed arguments."""
        calls = self.reply.get("tool_calls")
        if not calls:
            return {"text": self.reply["content"]}
        functions = [one["function"] for one in calls]
        return {"calls": [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]}


def system(content: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str | None = None, calls: list[Message] | None = None) -> Message:
    """Return an assistant message, with its reasoning and tool calls where there are some."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def call(call_id: str, name: str, arguments: dict[str, Any]) -> Message:
    """Return one tool call of an assistant message."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def tool_result(call_id: str, content: str) -> Message:
    """Return the message that carries a tool's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}
