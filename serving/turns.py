"""From a checked chat body of any protocol to the prompt of the next turn and the way its output is read.

The vendor's recipe library converts messages, renders and encodes them. What it would drop without a word or refuse
for reasons that do not hold here (a named tool while thinking, two answers) is taken out of the body before, and
honoured by us.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import deepseek_recipe as recipe

from halocline.engine.prompt import ChatPrompt, Prompter
from halocline.hal.errors import RequestError
from halocline.serving.errors import ApiError, bad_field, from_request_error
from halocline.serving.grammar_spec import GrammarSpec
from halocline.serving.grammar_tools import OfferedTool, ToolGrammar, tool_grammar
from halocline.serving.output_parser import MARKUP

__all__ = ["ToolUse", "Turn", "TurnWishes", "answer_grammar", "check_named", "make_turn", "offered_tools"]

# What the recipe's bindings raise for values that they cannot take.
_RECIPE_REFUSES = (ValueError, TypeError, RuntimeError, OverflowError)


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """What is asked of tool calls.

    Attributes:
        offered: Functions that the model may call; none where tool_choice is none.
        required: Whether it must call one.
        named: The one that it must call.
        parallel: Whether it may make several calls.
    """

    offered: Sequence[OfferedTool] = ()
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def is_constrained(self) -> bool:
        """Whether the calls need a grammar."""
        return bool(self.offered) and (self.required or not self.parallel or any(tool.strict for tool in self.offered))


@dataclass(frozen=True, kw_only=True)
class TurnWishes:
    """What a body asks of the turn besides its messages.

    Attributes:
        tools: Of calls.
        answer_format: `None`, or kind and content: ("json", schema), ("regex", text), ("choice", texts).
        format_path: Field that the format came from.
        stop: Texts that end the answer.
        max_reasoning_tokens: Bound of the reasoning.
        continue_last: Whether a last message of the assistant is continued.
    """

    tools: ToolUse = field(default_factory=ToolUse)
    answer_format: tuple[str, Any] | None = None
    format_path: str = "response_format"
    stop: Sequence[str] = ()
    max_reasoning_tokens: int | None = None
    continue_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A prompt and how the output after it is read.

    Attributes:
        prompt: Rendered and encoded.
        request: As the recipe converted it; its generators are made of this one.
        parsing: How the output is taken apart.
        grammar: Restriction of the output, or None.
    """

    prompt: ChatPrompt
    request: recipe.ConversationRequest
    parsing: recipe.ParsingOptions
    grammar: GrammarSpec | None


def make_turn(
    protocol: type[recipe.ChatCompletionRequest | recipe.ResponsesRequest | recipe.MessagesRequest],
    body: Mapping[str, Any],
    wishes: TurnWishes,
    prompter: Prompter,
    *,
    messages_field: str = "messages",
) -> Turn:
    """Converts, renders and encodes a turn.

    Args:
        protocol: The recipe's request class of the body's protocol.
        body: Messages, tools and the mode of thinking, in the protocol's own words; nothing else.
        wishes: What the body asks besides.
        prompter: Of the checkpoint.
        messages_field: Field to be named when the conversation is refused.

    Raises:
        ApiError: The conversation is not one.
    """
    converted = _convert(protocol, {**body, "model": prompter.model_name}, prompter, messages_field)
    try:
        conversation = _rebuilt(converted.conversation, wishes)
    except _RECIPE_REFUSES as error:
        raise bad_field(wishes.format_path, _first_line(error)) from error
    request = recipe.ConversationRequest(conversation, converted.model_version)
    try:
        prompt = prompter.render(request)
    except RequestError as error:
        raise from_request_error(error, {"prompt": messages_field}) from error
    parsing = _parsing(converted.parsing_options, conversation, wishes)
    return Turn(prompt=prompt, request=converted, parsing=parsing, grammar=_grammar(wishes, prompter, parsing))


def offered_tools(functions: Sequence[Mapping[str, Any]]) -> list[OfferedTool]:
    """Functions as the chat protocol states them; an empty schema stands for no parameters."""
    return [
        OfferedTool(name=function["name"], schema=function.get("parameters") or {}, strict=bool(function.get("strict")))
        for function in functions
    ]


def _convert(protocol: Any, body: dict[str, Any], prompter: Prompter, messages_field: str) -> Any:
    try:
        return protocol(body).convert(prompter.conversion_options)
    except recipe.ConversionError as error:
        raise bad_field(messages_field, _message_of(error)) from error
    except _RECIPE_REFUSES as error:
        raise bad_field(messages_field, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", maxsplit=1)[0].removeprefix("invalid request body: ")[:300]


def _message_of(error: recipe.ConversionError) -> str:
    """The sentence in the recipe's error body."""
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the conversation is refused"


def _rebuilt(conversation: recipe.Conversation, wishes: TurnWishes) -> recipe.Conversation:
    """The conversation with what the protocols say and the recipe's conversion does not carry over."""
    messages = list(conversation.messages)
    last = messages[-1] if messages else None
    if wishes.continue_last and last is not None and last.role == "assistant" and not last.prefix:
        messages[-1] = recipe.AssistantMessage(last.content, last.reasoning_content, last.tool_calls, prefix=True)
    schema = wishes.answer_format[1] if wishes.answer_format and wishes.answer_format[0] == "json" else None
    return recipe.Conversation(
        messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        reasoning_effort=conversation.reasoning_effort,
        response_schema=schema if schema != {"type": "object"} else None,
    )


def _parsing(
    options: recipe.ParsingOptions, conversation: recipe.Conversation, wishes: TurnWishes
) -> recipe.ParsingOptions:
    last = conversation.messages[-1]
    stage = options.thinking_initial_stage
    if conversation.thinking_mode and last.role == "assistant" and last.prefix:
        stages = recipe.ThinkingInitialStage
        reasons = bool(last.reasoning_content) and not last.content
        stage = stages.ReasoningContinuation if reasons else stages.ContentContinuation
    return recipe.ParsingOptions(
        parse_tool_calls=bool(wishes.tools.offered),
        thinking_initial_stage=stage,
        stop_sequences=list(wishes.stop),
    )


def _grammar(wishes: TurnWishes, prompter: Prompter, parsing: recipe.ParsingOptions) -> GrammarSpec | None:
    """The restriction that the wishes amount to."""
    stage = parsing.thinking_initial_stage
    reasons = stage is not None and bool(stage.starts_in_reasoning())
    bound = wishes.max_reasoning_tokens if reasons else None
    spec = _calls_grammar(wishes, prompter) or answer_grammar(wishes.answer_format, wishes.format_path)
    if spec is None and bound is None:
        return None
    return replace(spec or GrammarSpec(kind="any"), starts_in_reasoning=reasons, max_reasoning_tokens=bound)


def _calls_grammar(wishes: TurnWishes, prompter: Prompter) -> GrammarSpec | None:
    """The grammar of an answer with calls, where the calls or the answer are restricted."""
    tools, answer = wishes.tools, wishes.answer_format
    if not tools.is_constrained and not (tools.offered and answer is not None):
        return None
    if answer is not None and answer[0] != "json" and not tools.required:
        raise bad_field(wishes.format_path, f"{answer[0]} cannot be combined with tools", code="unsupported_value")
    asked = ToolGrammar(
        tools=[tool for tool in tools.offered if tools.named in (None, tool.name)],
        required=tools.required,
        parallel=tools.parallel,
        markup_id=prompter.tokenizer.control_id(MARKUP),
        answer=answer[1] if answer is not None else None,
    )
    return GrammarSpec(kind="lark", text=tool_grammar(asked), path="tools" if answer is None else wishes.format_path)


def answer_grammar(answer: tuple[str, Any] | None, path: str) -> GrammarSpec | None:
    """The grammar of an answer's form, or None where it is free; `path` is the form's field."""
    if answer is None:
        return None
    kind, content = answer
    if kind == "choice":
        texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in content)
        return GrammarSpec(kind="lark", text=f"start: {texts}", path=path)
    if kind == "regex":
        return GrammarSpec(kind="regex", text=content, path=path)
    return GrammarSpec(kind="json", text=json.dumps(content), path=path)


def check_named(named: str, offered: Sequence[OfferedTool], path: str) -> None:
    """Refuses a choice of a function that is not offered."""
    if named not in {tool.name for tool in offered}:
        names = ", ".join(tool.name for tool in offered[:20]) or "none"
        raise ApiError(
            400, f"{path}: names {named!r}, which is not among the tools ({names})", param=path, code="invalid_value"
        )
