"""A chat turn's output, split into reasoning, answer and tool calls by the vendor's own parser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import deepseek_recipe as recipe

from halocline.engine.detokenizer import REPLACEMENT, Detokenizer
from halocline.engine.prompt import ChatPrompt, Prompter
from halocline.engine.results import FinishReason, OutputDelta, ToolCall
from halocline.engine.stopping import StopStrings

__all__ = ["ChatStream"]


class ChatStream:
    """Parses the tokens of one chat turn as they come.

    The parser tells control tokens from text that spells them by their ids. Stop strings apply to the answer, not to
    reasoning or tool calls. The parser drops what it holds back for an incomplete character when the output ends
    (deepseek-recipe 0.2.0); that rest is kept here and given to it as text.

    Attributes:
        reasoning: So far.
        content: So far, the answer.
        tool_calls: So far; the last one may be incomplete while tokens come.
        num_tokens: Tokens taken.
        num_reasoning_tokens: Of these, those before the end of the reasoning. (The parser's own number is too large
            when it had to wait for the rest of a character.)
    """

    def __init__(self, prompter: Prompter, prompt: ChatPrompt, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Stop strings have no effect on what the first `min_tokens` tokens say."""
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.request, "chat", prompter.model_name)
        self._processor = recipe.StreamProcessor(generator, prompt.request.parsing_options, prompter.recipe_tokenizer)
        self._processor.push(recipe.InferenceChunk.ready())
        self._detokenizer = Detokenizer(prompter.tokenizer)
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._unclear = ""
        self._calls: list[dict[str, str]] = []
        self._called = False
        stage = prompt.request.parsing_options.thinking_initial_stage
        self._reasons = stage is not None and stage.starts_in_reasoning()
        self._end_of_reasoning = prompter.tokenizer.control_id("</think>")
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.reasoning = ""
        self.content = ""

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls so far."""
        return tuple(ToolCall(**call) for call in self._calls)

    @property
    def called_tools(self) -> bool:
        """Whether the parser saw complete tool calls; known at the end."""
        return self._called

    def push(self, token_ids: Iterable[int]) -> OutputDelta:
        """Takes tokens and returns what is certain after them."""
        deltas = []
        for token_id in token_ids:
            if self.stop_found is not None:
                break
            self.num_tokens += 1
            self._reasons &= token_id != self._end_of_reasoning
            self.num_reasoning_tokens += self._reasons
            self._track_unclear(token_id)
            deltas.append(self._take(self._processor.push(recipe.InferenceChunk.tokens([token_id]))))
        return _join(deltas)

    def finish(self, reason: FinishReason) -> OutputDelta:
        """Returns the rest, when no token follows."""
        deltas = []
        rest = self._unclear + self._detokenizer.flush()
        if rest and self.stop_found is None:
            deltas.append(self._take(self._processor.push(recipe.InferenceChunk.text(rest))))
        how = recipe.InferenceFinishReason.Length if reason == "length" else recipe.InferenceFinishReason.Stop
        deltas.append(self._take([*self._processor.push(recipe.InferenceChunk.finish(how)), *self._processor.finish()]))
        held = self._stops.flush()
        self.content += held
        deltas.append(OutputDelta(content=held))
        return _join(deltas)

    def _track_unclear(self, token_id: int) -> None:
        """Keeps the text that the parser, whose decoding waits at each U+FFFD, has not seen yet."""
        self._unclear += self._detokenizer.push(token_id)
        if not self._detokenizer.waiting and not self._unclear.endswith(REPLACEMENT):
            self._unclear = ""

    def _take(self, chunks: Iterable[Any]) -> OutputDelta:
        """Adds the parser's chunks to what is known."""
        reasoning, content, changed = "", "", False
        for chunk in chunks:
            stated = json.loads(chunk.to_json())
            for choice in stated["choices"]:
                delta = choice["delta"]
                reasoning += delta.get("reasoning_content") or ""
                content += self._until_stop(delta.get("content") or "")
                self._called |= choice["finish_reason"] == "tool_calls"
                for call in delta.get("tool_calls") or ():
                    content += self._stops.flush()
                    self._add_call(call)
                    changed = True
        self.reasoning += reasoning
        self.content += content
        return OutputDelta(reasoning=reasoning, content=content, tool_calls=self.tool_calls if changed else ())

    def _until_stop(self, text: str) -> str:
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)

    def _add_call(self, stated: dict[str, Any]) -> None:
        index = stated["index"]
        while len(self._calls) <= index:
            self._calls.append({"id": "", "name": "", "arguments": ""})
        call, function = self._calls[index], stated.get("function") or {}
        call["id"] += stated.get("id") or ""
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""


def _join(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """One delta of several; tool calls are cumulative, so the last ones hold."""
    calls = [delta.tool_calls for delta in deltas if delta.tool_calls]
    return OutputDelta(
        reasoning="".join(delta.reasoning for delta in deltas),
        content="".join(delta.content for delta in deltas),
        tool_calls=calls[-1] if calls else (),
    )
