"""POST /v1/messages: the protocol of Anthropic's clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from halocline.engine.admission import ModelLimits, admit
from halocline.hal.errors import RequestError
from halocline.serving.chat import check_min_tokens, shown_function
from halocline.serving.engine_client import EngineRequest
from halocline.serving.errors import ApiError, anthropic_body, bad_field, from_request_error
from halocline.serving.fields_messages import COUNT_FIELDS, MESSAGE_FIELDS
from halocline.serving.output_parser import Vocabulary
from halocline.serving.reply import Job, ServedModel, new_id, sse
from halocline.serving.sampling import sampling_params
from halocline.serving.schema import check
from halocline.serving.single_writer import SingleWriter
from halocline.serving.turns import ToolUse, Turn, TurnWishes, check_named, make_turn, offered_tools

__all__ = ["MessageWriter", "count_tokens", "message_job", "message_turn"]


def message_job(body: Mapping[str, Any], model: ServedModel, limits: ModelLimits, vocabulary: Vocabulary) -> Job:
    """Checks a body and makes its prompt.

    Raises:
        ApiError: A field is at fault.
    """
    check(MESSAGE_FIELDS, body)
    model.check_name(body["model"])
    check_min_tokens(body, "stop_sequences", "tools")
    turn = message_turn(body, model)
    params = sampling_params(body, max_tokens=("max_tokens", body["max_tokens"]))
    try:
        admitted = admit(turn.prompt.token_ids, params, limits)
    except RequestError as error:
        raise from_request_error(error, {"prompt": "messages"}) from error
    answer_id = new_id("msg_")
    stream = bool(body.get("stream"))
    writer = MessageWriter(answer_id, model, turn, vocabulary, stop_ids=admitted.stop_ids, stream=stream)
    request = EngineRequest(id=answer_id, prompt_ids=admitted.prompt_ids, params=admitted.params, grammar=turn.grammar)
    user = (body.get("metadata") or {}).get("user_id")
    return Job(id=answer_id, requests=(request,), writer=writer, stream=stream, user=user)


def count_tokens(body: Mapping[str, Any], model: ServedModel) -> dict[str, int]:
    """Answers /v1/messages/count_tokens."""
    check(COUNT_FIELDS, body)
    model.check_name(body["model"])
    return {"input_tokens": len(message_turn(body, model).prompt.token_ids)}


def message_turn(body: Mapping[str, Any], model: ServedModel) -> Turn:
    """The prompt of a checked body, and how its output is read."""
    use, tools = _tools(body)
    thinking = body.get("thinking") or {"type": "disabled"}
    config = body.get("output_config") or {}
    thinks = thinking["type"] != "disabled"
    reduced: dict[str, Any] = {
        "messages": [_message(message) for message in body["messages"]],
        "max_tokens": body.get("max_tokens") or 1,
        "thinking": {"type": "enabled" if thinks else "disabled"},
    }
    if thinks:
        reduced["thinking"]["budget_tokens"] = 1
        reduced["output_config"] = {"effort": config.get("effort") or model.prompter.effort}
    if body.get("system"):
        reduced["system"] = body["system"]
    if tools:
        reduced["tools"] = tools
    budget = thinking.get("budget_tokens")
    if budget is not None and budget >= body.get("max_tokens", budget + 1):
        raise bad_field("thinking.budget_tokens", "must be less than max_tokens")
    form = config.get("format")
    wishes = TurnWishes(
        tools=use,
        answer_format=("json", form["schema"]) if form else None,
        format_path="output_config.format",
        stop=body.get("stop_sequences") or (),
        max_reasoning_tokens=budget,
        continue_last=True,
    )
    return make_turn(recipe.MessagesRequest, reduced, wishes, model.prompter)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the recipe's words; the recipe does not carry `is_error` over, so it goes into the text."""
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    return {**message, "content": [_block(block) for block in content]}


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in block.items() if value is not None and key not in ("cache_control", "caller")}
    if kept["type"] == "thinking":
        kept.setdefault("signature", "")
    if kept["type"] == "tool_result" and kept.pop("is_error", False):
        content = kept.get("content") or ""
        if isinstance(content, str):
            kept["content"] = f"Error: {content}"
        else:
            kept["content"] = [{"type": "text", "text": "Error: "}, *content]
    return kept


def _tools(body: Mapping[str, Any]) -> tuple[ToolUse, list[dict[str, Any]]]:
    """What is asked of calls, and the tools that the prompt shows."""
    stated = [dict(tool) for tool in body.get("tools") or ()]
    choice: Mapping[str, Any] = body.get("tool_choice") or {"type": "auto"}
    if choice["type"] == "none":
        stated = []
    elif not stated and choice["type"] != "auto":
        raise bad_field("tool_choice", "needs tools")
    functions = [{**tool, "parameters": tool["input_schema"]} for tool in stated]
    offered = offered_tools(functions)
    named = choice["name"] if choice["type"] == "tool" else None
    if named is not None:
        check_named(named, offered, "tool_choice.name")
    use = ToolUse(
        offered=offered,
        required=choice["type"] in ("any", "tool"),
        named=named,
        parallel=not choice.get("disable_parallel_tool_use"),
    )
    shown = [shown_function(one) for one in functions]
    return use, [
        {
            "name": one["name"],
            "input_schema": one["parameters"],
            **({"description": one["description"]} if "description" in one else {}),
        }
        for one in shown
    ]


class MessageWriter(SingleWriter):
    """Writes the events of a message, or the message object."""

    response_class = recipe.MessagesResponse
    patched = ('{"type":"message_delta"',)

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        turn: Turn,
        vocabulary: Vocabulary,
        *,
        stop_ids: tuple[int, ...],
        stream: bool,
    ) -> None:
        generator = recipe.MessagesRequest.chunk_generator(turn.request, answer_id, model.name)
        super().__init__(answer_id, model, turn, vocabulary, generator, stop_ids=stop_ids, stream=stream)

    def patch(self, event: dict[str, Any]) -> dict[str, Any]:
        """Fills in our counts."""
        event["usage"] = self._usage(event["usage"])
        return event

    def patch_whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Fills in our counts."""
        answer["usage"] = self._usage(answer["usage"])
        return answer

    def error(self, error: ApiError) -> bytes:
        """The protocol's error event."""
        return sse(anthropic_body(error), "error")

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**usage, "output_tokens": self.counts.completion}
