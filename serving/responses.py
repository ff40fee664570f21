"""POST /v1/responses: items of a conversation to a job, tokens to the protocol's events."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import deepseek_recipe as recipe

from halocline.engine.admission import ModelLimits, admit
from halocline.hal.errors import RequestError
from halocline.serving.chat import check_min_tokens, shown_function
from halocline.serving.engine_client import EngineRequest
from halocline.serving.errors import ApiError, bad_field, from_request_error
from halocline.serving.fields_responses import RESPONSE_FIELDS
from halocline.serving.output_parser import Vocabulary
from halocline.serving.reply import Job, ServedModel, caller, new_id, sse
from halocline.serving.sampling import sampling_params
from halocline.serving.schema import check
from halocline.serving.single_writer import SingleWriter
from halocline.serving.turns import ToolUse, Turn, TurnWishes, check_named, make_turn, offered_tools

__all__ = ["ResponseWriter", "response_job", "response_turn"]

_CARRIED = "plain:"


def response_job(body: Mapping[str, Any], model: ServedModel, limits: ModelLimits, vocabulary: Vocabulary) -> Job:
    """Checks a body and makes its prompt.

    Raises:
        ApiError: A field is at fault.
    """
    body = _typed_items(body)
    check(RESPONSE_FIELDS, body)
    model.check_name(body["model"])
    include = body.get("include") or ()
    wants_logprobs = "message.output_text.logprobs" in include
    if body.get("top_logprobs") and not wants_logprobs:
        raise bad_field("top_logprobs", 'needs include=["message.output_text.logprobs"]')
    check_min_tokens(body, "tools")
    turn = response_turn(body, model)
    params = sampling_params(
        body,
        max_tokens=("max_output_tokens", body.get("max_output_tokens")),
        logprobs=(body.get("top_logprobs") or 0) if wants_logprobs else None,
    )
    try:
        admitted = admit(turn.prompt.token_ids, params, limits)
    except RequestError as error:
        raise from_request_error(error, {"max_tokens": "max_output_tokens", "prompt": "input"}) from error
    answer_id = new_id("resp_")
    stream = bool(body.get("stream"))
    writer = ResponseWriter(
        answer_id, model, turn, vocabulary, body, stop_ids=admitted.stop_ids, wants_logprobs=wants_logprobs
    )
    request = EngineRequest(id=answer_id, prompt_ids=admitted.prompt_ids, params=admitted.params, grammar=turn.grammar)
    return Job(id=answer_id, requests=(request,), writer=writer, stream=stream, user=caller(body))


def response_turn(body: Mapping[str, Any], model: ServedModel) -> Turn:
    """The prompt of a checked body, and how its output is read."""
    use, tools = _tools(body)
    effort = (body.get("reasoning") or {}).get("effort") or model.prompter.effort
    reduced: dict[str, Any] = {"input": _items(body["input"]), "reasoning": {"effort": effort}}
    if body.get("instructions"):
        reduced["instructions"] = body["instructions"]
    if tools:
        reduced["tools"] = tools
    wishes = TurnWishes(
        tools=use,
        answer_format=_answer_format((body.get("text") or {}).get("format")),
        format_path="text.format",
    )
    return make_turn(recipe.ResponsesRequest, reduced, wishes, model.prompter, messages_field="input")


def _typed_items(body: Any) -> Any:
    """Items without a type are messages; the protocol allows that short form."""
    if not isinstance(body, dict) or not isinstance(body.get("input"), list):
        return body
    items = [
        {"type": "message", **item} if isinstance(item, dict) and "type" not in item and "role" in item else item
        for item in body["input"]
    ]
    return {**body, "input": items}


def _items(stated: str | list[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """The input in the recipe's words."""
    return stated if isinstance(stated, str) else [_item(item) for item in stated]


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in item.items() if value is not None}
    if kept["type"] == "message" and kept["role"] == "developer":
        kept["role"] = "system"
    if kept["type"] == "reasoning" and not kept.get("content"):
        carried = _carried_reasoning(kept.pop("encrypted_content", ""))
        if carried:
            kept["content"] = [{"type": "reasoning_text", "text": carried}]
        kept.setdefault("summary", [])
    return kept


def _carried_reasoning(text: str) -> str:
    """Reasoning that a client brings back in the field that we gave it in; nothing of other servers' making."""
    if not text.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_CARRIED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _answer_format(stated: Mapping[str, Any] | None) -> tuple[str, Any] | None:
    kind = stated["type"] if stated else "text"
    if stated is None or kind == "text":
        return None
    if kind == "json_object":
        return "json", {"type": "object"}
    return ("json", stated["schema"]) if kind == "json_schema" else ("regex", stated["regex"])


def _tools(body: Mapping[str, Any]) -> tuple[ToolUse, list[dict[str, Any]]]:
    """What is asked of calls, and the tools that the prompt shows."""
    tools = [dict(tool) for tool in body.get("tools") or ()]
    choice: Any = body.get("tool_choice") or "auto"
    required, named = choice == "required", None
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        allowed = {one["name"] for one in choice["tools"]}
        for name in allowed:
            check_named(name, offered_tools(_functions(tools)), "tool_choice.tools")
        tools = [one for one in tools if one.get("name") in allowed]
        required = choice["mode"] == "required"
    elif isinstance(choice, dict):
        named, required = choice["name"], True
    if choice == "none":
        tools = []
    elif not tools and choice != "auto":
        raise bad_field("tool_choice", "needs tools")
    offered = offered_tools(_functions(tools))
    if named is not None:
        check_named(named, offered, "tool_choice.name")
    parallel = body.get("parallel_tool_calls") is not False
    return ToolUse(offered=offered, required=required, named=named, parallel=parallel), [_shown(one) for one in tools]


def _functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every function that may be called, by the name that the prompt gives it."""
    functions = []
    for tool in tools:
        if tool["type"] == "namespace":
            functions += [{**one, "name": f"{tool['name']}__{one['name']}"} for one in tool["tools"]]
        elif tool["type"] == "custom":
            patch = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            functions.append({"name": tool["name"], "parameters": patch})
        else:
            functions.append(tool)
    return functions


def _namespaces(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function by the name that the prompt gives it, as the recipe makes it up."""
    spaces = [tool for tool in tools if tool["type"] == "namespace"]
    return {f"{one['name']}__{tool['name']}": (one["name"], tool["name"]) for one in spaces for tool in one["tools"]}


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        return {**tool, "tools": [shown_function(one) for one in tool["tools"]]}
    return shown_function(tool)


class ResponseWriter(SingleWriter):
    """Writes the events of a response, or the response object."""

    response_class = recipe.ResponsesResponse
    patched = (
        '{"type":"response.created"',
        '{"type":"response.in_progress"',
        '{"type":"response.completed"',
        '{"type":"response.incomplete"',
        '{"type":"response.output_item.',
    )

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        turn: Turn,
        vocabulary: Vocabulary,
        body: Mapping[str, Any],
        *,
        stop_ids: tuple[int, ...],
        wants_logprobs: bool,
    ) -> None:
        generator = recipe.ResponsesRequest.chunk_generator(turn.request, answer_id, model.name)
        generator = generator.with_namespace_tool_map(_namespaces(body.get("tools") or ()))
        super().__init__(
            answer_id,
            model,
            turn,
            vocabulary,
            generator,
            stop_ids=stop_ids,
            stream=bool(body.get("stream")),
            wants_logprobs=wants_logprobs,
        )
        self._echo = _echo(body, model.prompter.effort)
        self._carries_reasoning = "reasoning.encrypted_content" in (body.get("include") or ())

    def patch(self, event: dict[str, Any]) -> dict[str, Any]:
        """Fills in what the request asked and our counts."""
        if "response" in event:
            event["response"] = self.patch_whole(event["response"])
        else:
            event["item"] = self._item(event["item"])
        return event

    def patch_whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Fills in what the request asked and our counts."""
        answer.update(self._echo)
        answer["output"] = [self._item(item) for item in answer["output"]]
        if answer.get("status") != "in_progress":
            counts = self.counts
            answer["usage"] = {
                "input_tokens": counts.prompt,
                "input_tokens_details": {"cached_tokens": counts.cached},
                "output_tokens": counts.completion,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning},
                "total_tokens": counts.prompt + counts.completion,
            }
        return answer

    def error(self, error: ApiError) -> bytes:
        """The protocol's error event."""
        stated = {"type": "error", "code": error.code or error.kind, "message": error.message, "param": error.param}
        return sse({**stated, "sequence_number": self.num_events}, "error")

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        """A reasoning item carries its text a second time for clients that bring back nothing else."""
        if item["type"] != "reasoning":
            return item
        text = "".join(part["text"] for part in item.get("content") or ())
        item["encrypted_content"] = None
        if self._carries_reasoning and item.get("status") != "in_progress":
            item["encrypted_content"] = _CARRIED + base64.b64encode(text.encode()).decode()
        return item


def _echo(body: Mapping[str, Any], effort: str) -> dict[str, Any]:
    """Settings of the request that the response object repeats."""
    text = body.get("text") or {}
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort") or effort, "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
        "user": body.get("user"),
    }
