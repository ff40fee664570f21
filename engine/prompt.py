"""Prompts: plain completions and chat turns, the latter rendered by the vendor's own recipe library.

There is no generic template to fall back to: a chat turn is what `deepseek-recipe` renders, byte for byte, and the
library encodes the texts of users without the control tokens, so that no user can write one.

Reasoning effort. `DEFAULT_EFFORT` holds when a caller says nothing. The names are those of the vendor's API:

| effort | thinking | text before the system message |
| --- | --- | --- |
| `none` | off | none |
| `minimal`, `low` | on | none |
| `medium`, `high`, `xhigh` | on | asks for thorough thinking |
| `ultra`, `max` | on | asks for the most thorough thinking; wants a context of 384K tokens and more |

The default is `low`: the April releases were made for prompts without such a text, and their encoder writes none unless
asked. The vendor's present service defaults to `high`; for a release of that scheme, load it with `effort="high"`.
An unknown name is refused. `none` and `thinking=False` mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import deepseek_recipe as recipe

from halocline.engine.sampling_params import FieldError
from halocline.engine.tokenizer import Tokenizer
from halocline.hal.errors import CheckpointError, RequestError, lines

__all__ = ["DEFAULT_EFFORT", "EFFORTS", "ChatPrompt", "Prompter", "check_effort", "refuse_images"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
DEFAULT_EFFORT = "low"


@dataclass(frozen=True, eq=False, kw_only=True)
class ChatPrompt:
    """A rendered chat turn.

    Attributes:
        text: As rendered; for people and logs, never to be encoded again.
        token_ids: What the model reads, one BOS included.
        thinking: Whether the turn to be generated thinks.
        request: The recipe's request, which knows how its output is parsed.
        constraint: Kind and text of the constraint that a response format asks for, or None.
    """

    text: str
    token_ids: tuple[int, ...]
    thinking: bool
    request: recipe.ConversationRequest
    constraint: tuple[str, str] | None


class Prompter:
    """Renders and encodes prompts of one checkpoint.

    Attributes:
        model_name: Name under which the recipe library knows this checkpoint, registered as an alias of V4.
        effort: Reasoning effort of a turn that states none.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, bos_id: int, model_name: str = "halocline", effort: str = DEFAULT_EFFORT
    ) -> None:
        check_effort(effort)
        self.tokenizer = tokenizer
        self.bos_id = bos_id
        self.model_name = model_name
        self.effort = effort

    def ids(self, prompt: str | Sequence[int] | ChatPrompt) -> Sequence[int]:
        """What the model reads of a prompt: text after one BOS, token ids as they are, a chat turn as rendered."""
        if isinstance(prompt, str):
            return self.completion(prompt)
        return prompt.token_ids if isinstance(prompt, ChatPrompt) else prompt

    def completion(self, text: str, *, control_tokens: bool = False) -> tuple[int, ...]:
        """Ids of a plain text after one BOS.

        Args:
            text: The text to be continued.
            control_tokens: Read control tokens spelled in the text as such, for prompts that were rendered before. A
                BOS at its beginning is the one BOS then.
        """
        if not text:
            raise RequestError(lines("the prompt is empty", try_="a text, or a chat turn"))
        if not control_tokens:
            return (self.bos_id, *self.tokenizer.encode(text))
        ids = self.tokenizer.encode_with_control_tokens(text)
        return tuple(ids) if ids[0] == self.bos_id else (self.bos_id, *ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        thinking: bool = True,
        effort: str | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Renders a conversation so that the model writes its next turn.

        Args:
            messages: As in the chat completions API: role, content, reasoning_content, tool_calls, tool_call_id; on the
                last assistant message `prefix: true` continues it.
            tools: Function tools as in that API.
            tool_choice: `auto`, `none`, `required` or one function; the last two need thinking off.
            thinking: Whether the model thinks before it answers.
            effort: One of `EFFORTS`; None is `Prompter.effort`.
            response_format: As in that API; also gives `ChatPrompt.constraint`.

        Raises:
            RequestError: The conversation is not one.
        """
        effort = self.effort if effort is None else effort
        check_effort(effort)
        refuse_images(messages)
        thinking = thinking and effort != "none"
        body: dict[str, Any] = {
            "model": self.model_name,
            "messages": [dict(message) for message in messages],
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if thinking:
            body["reasoning_effort"] = effort
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        if tool_choice is not None:
            body["tool_choice"] = tool_choice
        if response_format is not None:
            body["response_format"] = response_format
        return self.render(self._convert(body))

    def render(self, request: recipe.ConversationRequest) -> ChatPrompt:
        """Renders a request that the recipe library has converted, from whatever protocol."""
        conversation = request.conversation
        _check_conversation(conversation)
        try:
            text = self._encoding.render_conversation(conversation).prompt
            ids = self._encoding.encode(conversation)
        except RuntimeError as error:
            raise CheckpointError(
                lines("the tokenizer cannot encode a chat turn", found=error, try_="the tokenizer.json of the release")
            ) from error
        constraint = request.inference_options.output_constraint
        return ChatPrompt(
            text=text,
            token_ids=tuple(ids),
            thinking=conversation.thinking_mode,
            request=request,
            constraint=None if constraint is None else (constraint.kind, constraint.schema),
        )

    @cached_property
    def recipe_tokenizer(self) -> recipe.Tokenizer:
        """The tokenizer in the recipe library's own form."""
        return recipe.Tokenizer.from_str(self.tokenizer.content)

    @cached_property
    def conversion_options(self) -> recipe.ConversionOptions:
        """Options of protocol conversion that know `model_name`."""
        return recipe.ConversionOptions().with_model_alias(self.model_name, recipe.ModelVersion.DeepseekV4Pro)

    @cached_property
    def _encoding(self) -> recipe.DeepseekV4Encoding:
        return recipe.DeepseekV4Encoding().with_tokenizer(self.recipe_tokenizer)

    def _convert(self, body: dict[str, Any]) -> recipe.ConversationRequest:
        try:
            return recipe.ChatCompletionRequest(body).convert(self.conversion_options)
        except recipe.ConversionError as error:
            raise RequestError(lines("the chat turn is refused", found=_message_of(error))) from error
        except (ValueError, TypeError) as error:
            raise RequestError(lines("the chat turn is malformed", found=error)) from error


def check_effort(effort: str) -> None:
    """Refuses an effort that is not one of `EFFORTS`."""
    if effort not in EFFORTS:
        raise FieldError("reasoning_effort", effort, f"must be one of {', '.join(EFFORTS)}")


def refuse_images(messages: Iterable[Mapping[str, Any]]) -> None:
    """Refuses message parts that are not text; the recipe would put `[Unsupported Image]` in their place."""
    for message in messages:
        parts = message.get("content")
        if not isinstance(parts, list | tuple):
            continue
        for part in parts:
            if isinstance(part, Mapping) and part.get("type") != "text":
                raise RequestError(
                    lines("this model reads text only", asked=f"a part of type {part.get('type')!r}", try_="text parts")
                )


def _check_conversation(conversation: recipe.Conversation) -> None:
    """Refuses what the recipe would render into something that V4 was not made for."""
    messages = conversation.messages
    last = messages[-1] if messages else None
    if last is None or last.role == "system":
        raise RequestError(lines("the conversation has no turn to answer", try_="a message with the role user"))
    if last.role == "assistant" and not last.prefix:
        raise RequestError(
            lines(
                "the conversation ends with a finished assistant message",
                try_='a user message after it, or "prefix": true to continue it',
            )
        )


def _message_of(error: recipe.ConversionError) -> str:
    """The sentence in the recipe's error body."""
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.body
