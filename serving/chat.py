"""POST /v1/chat/completions: a body to a job, tokens to chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from halocline.engine.admission import ModelLimits, admit
from halocline.hal.errors import RequestError
from halocline.serving.engine_client import EngineRequest, TokenDelta
from halocline.serving.errors import ApiError, bad_field, from_request_error, openai_body
from halocline.serving.fields_chat import CHAT_FIELDS
from halocline.serving.output_parser import OutputParser, Vocabulary, output_error
from halocline.serving.reply import Job, ServedModel, TokenCounts, caller, new_id, sse
from halocline.serving.sampling import sampling_params, stop_texts
from halocline.serving.schema import check
from halocline.serving.turns import ToolUse, Turn, TurnWishes, check_named, make_turn, offered_tools

__all__ = ["ChatWriter", "chat_job", "chat_turn"]


def chat_job(body: Mapping[str, Any], model: ServedModel, limits: ModelLimits, vocabulary: Vocabulary) -> Job:
    """Checks a body and makes its prompt.

    Raises:
        ApiError: A field is at fault.
    """
    check(CHAT_FIELDS, body)
    model.check_name(body["model"])
    _check_together(body)
    turn = chat_turn(body, model)
    name, most = _max_tokens(body)
    wants_logprobs = bool(body.get("logprobs"))
    params = sampling_params(
        body, max_tokens=(name, most), logprobs=(body.get("top_logprobs") or 0) if wants_logprobs else None
    )
    try:
        admitted = admit(turn.prompt.token_ids, params, limits)
    except RequestError as error:
        raise from_request_error(error, {"max_tokens": name, "prompt": "messages"}) from error
    answer_id = new_id("chatcmpl-")
    writer = ChatWriter(
        answer_id,
        model,
        turn,
        vocabulary,
        num_outputs=params.n,
        stop_ids=admitted.stop_ids,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        wants_logprobs=wants_logprobs,
    )
    request = EngineRequest(id=answer_id, prompt_ids=admitted.prompt_ids, params=admitted.params, grammar=turn.grammar)
    return Job(id=answer_id, requests=(request,), writer=writer, stream=bool(body.get("stream")), user=caller(body))


def chat_turn(body: Mapping[str, Any], model: ServedModel) -> Turn:
    """The prompt of a checked body, and how its output is read."""
    tools, functions = _tools(body)
    reduced: dict[str, Any] = {"messages": [_message(one, body["messages"]) for one in body["messages"]]}
    if functions:
        reduced["tools"] = functions
    thinking = _thinking(body)
    reduced["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if thinking:
        reduced["reasoning_effort"] = body.get("reasoning_effort") or model.prompter.effort
    wishes = TurnWishes(
        tools=tools, answer_format=answer_format(body.get("response_format")), stop=stop_texts(body.get("stop"))
    )
    return make_turn(recipe.ChatCompletionRequest, reduced, wishes, model.prompter)


def answer_format(stated: Mapping[str, Any] | None) -> tuple[str, Any] | None:
    """Kind and content of a response format."""
    kind = stated["type"] if stated else "text"
    if stated is None or kind == "text":
        return None
    if kind == "json_object":
        return "json", {"type": "object"}
    if kind == "json_schema":
        return "json", stated["json_schema"]["schema"]
    return kind, stated["regex"] if kind == "regex" else stated["choices"]


def _check_together(body: Mapping[str, Any]) -> None:
    """Refuses fields that are good alone and mean nothing together."""
    if body.get("stream_options") and not body.get("stream"):
        raise bad_field("stream_options", "needs stream=true")
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise bad_field("top_logprobs", "needs logprobs=true")
    check_min_tokens(body, "stop", "response_format", "tools")


def check_min_tokens(body: Mapping[str, Any], *others: str) -> None:
    """`min_tokens` bars the end; it cannot be kept where something else decides on the end."""
    for name in others:
        if body.get("min_tokens") and body.get(name):
            raise bad_field("min_tokens", f"cannot be combined with {name}", code="unsupported_value")


def _max_tokens(body: Mapping[str, Any]) -> tuple[str, int | None]:
    new, old = body.get("max_completion_tokens"), body.get("max_tokens")
    if new is not None and old is not None and new != old:
        raise bad_field("max_tokens", "differs from max_completion_tokens; give one of them")
    return ("max_completion_tokens", new) if new is not None else ("max_tokens", old)


def _thinking(body: Mapping[str, Any]) -> bool:
    """Whether the turn thinks; the several ways to say so must not contradict each other."""
    stated: dict[str, bool] = {}
    if body.get("thinking"):
        stated["thinking"] = body["thinking"]["type"] == "enabled"
    for name, value in (body.get("chat_template_kwargs") or {}).items():
        if value is not None:
            stated[f"chat_template_kwargs.{name}"] = value
    if body.get("reasoning_effort"):
        stated["reasoning_effort"] = body["reasoning_effort"] != "none"
    if len(set(stated.values())) > 1:
        first, *others = stated
        other = next(name for name in others if stated[name] is not stated[first])
        raise bad_field(other, f"contradicts {first}: one turns thinking on, the other off")
    return next(iter(stated.values()), True)


def _message(message: Mapping[str, Any], messages: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A message in the recipe's words."""
    kept = {key: value for key, value in message.items() if value is not None}
    if kept["role"] == "developer":
        kept["role"] = "system"
    if kept["role"] == "tool" and "name" in kept:
        called = {call["id"]: call["function"]["name"] for other in messages for call in other.get("tool_calls") or ()}
        if called.get(kept["tool_call_id"], kept["name"]) != kept["name"]:
            raise bad_field("messages", "a tool message's name differs from that of the function it answers")
        del kept["name"]
    return kept


def _tools(body: Mapping[str, Any]) -> tuple[ToolUse, list[dict[str, Any]]]:
    """What is asked of calls, and the tools that the prompt shows."""
    functions = [dict(tool["function"]) for tool in body.get("tools") or ()]
    choice: Any = body.get("tool_choice") or "auto"
    required, named = choice == "required", None
    if isinstance(choice, dict) and choice["type"] == "function":
        named, required = choice["function"]["name"], True
    elif isinstance(choice, dict):
        allowed = {one["function"]["name"] for one in choice["allowed_tools"]["tools"]}
        for name in allowed:
            check_named(name, offered_tools(functions), "tool_choice.allowed_tools")
        functions = [one for one in functions if one["name"] in allowed]
        required = choice["allowed_tools"]["mode"] == "required"
    if choice == "none":
        functions = []
    elif not functions and "tool_choice" in body and choice != "auto":
        raise bad_field("tool_choice", "needs tools")
    offered = offered_tools(functions)
    if named is not None:
        check_named(named, offered, "tool_choice.function.name")
    use = ToolUse(
        offered=offered, required=required, named=named, parallel=body.get("parallel_tool_calls") is not False
    )
    return use, [{"type": "function", "function": shown_function(one)} for one in functions]


def shown_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as the prompt shows it: `strict` is for the grammar, and an empty schema is one of no parameters."""
    shown = {key: value for key, value in function.items() if key != "strict" and value is not None}
    if "parameters" in shown and "type" not in shown["parameters"]:
        shown["parameters"] = {"type": "object", "properties": {}, **shown["parameters"]}
    return shown


class ChatWriter:
    """Writes chunks as they come, or one completion object at the end, from the same chunks."""

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        turn: Turn,
        vocabulary: Vocabulary,
        *,
        num_outputs: int,
        stop_ids: tuple[int, ...],
        stream: bool,
        include_usage: bool,
        wants_logprobs: bool,
    ) -> None:
        self.stopped: list[tuple[int, int]] = []
        self._id = answer_id
        self._model = model
        self._stream = stream
        self._include_usage = include_usage
        self._counts = TokenCounts(prompt=len(turn.prompt.token_ids))
        self._begun = [False] * num_outputs
        self._created = int(time.time())
        self._parsers = [
            OutputParser(
                recipe.ChatCompletionRequest.chunk_generator(turn.request, answer_id, model.name),
                turn.parsing,
                vocabulary,
                stop_ids=stop_ids,
                wants_logprobs=wants_logprobs,
            )
            for _ in range(num_outputs)
        ]
        self._whole = [
            recipe.ChatCompletionResponse(answer_id, model.name, self._created, 0, 0) for _ in range(num_outputs)
        ]

    def push(self, prompt: int, delta: TokenDelta) -> list[bytes]:
        """Chunks of new tokens."""
        del prompt  # there is one
        failure = output_error(delta)
        parser = self._parsers[delta.output]
        if parser.is_over():
            return []
        if failure is not None:
            raise failure
        chunks = []
        if not self._begun[delta.output]:
            self._begun[delta.output] = True
            cached = int(delta.facts.get("cached_tokens", 0))
            self._counts.cached = max(self._counts.cached, cached) if delta.output else cached
            chunks = parser.begin(self._counts.prompt, cached, self._model.fingerprint)
        chunks += parser.push(delta)
        if parser.is_over():
            self._counts.completion += parser.num_tokens
            self._counts.reasoning += parser.num_reasoning_tokens
            if parser.stopped_early:
                self.stopped.append((0, delta.output))
        if self._stream:
            return [self._event(chunk.to_json(), delta.output) for chunk in chunks]
        whole = self._whole[delta.output]
        for chunk in chunks:
            whole.accumulate(chunk)
        return []

    @property
    def is_over(self) -> bool:
        """Whether every output has ended."""
        return all(parser.is_over() for parser in self._parsers)

    def end(self) -> list[bytes]:
        """The token counts, if asked, and the mark of the end."""
        events = []
        if self._include_usage:
            events.append(sse({**self._head("chat.completion.chunk"), "choices": [], "usage": self._counts.openai()}))
        return [*events, b"data: [DONE]\n\n"]

    def whole(self) -> dict[str, Any]:
        """The completion object."""
        choices = []
        for index, response in enumerate(self._whole):
            choice = json.loads(response.to_json())["choices"][0]
            for call in choice["message"].get("tool_calls") or ():
                call.pop("index", None)
            choices.append({**choice, "index": index})
        return {**self._head("chat.completion"), "choices": choices, "usage": self._counts.openai()}

    def error(self, error: ApiError) -> bytes:
        """An event that official clients raise as an error."""
        return sse(openai_body(error))

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint or None,
        }

    def _event(self, text: str, output: int) -> bytes:
        """A chunk of the recipe as an event, with our index and without the usage that it puts into the last one."""
        if not text.endswith('"usage":null}'):
            stated = json.loads(text)
            stated["usage"] = None
            text = json.dumps(stated, ensure_ascii=False, separators=(",", ":"))
        if output:
            text = text.replace('"choices":[{"index":0,', f'"choices":[{{"index":{output},', 1)
        if not self._include_usage:
            text = text[: -len(',"usage":null}')] + "}"
        return f"data: {text}\n\n".encode()
