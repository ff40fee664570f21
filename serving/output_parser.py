"""Reads the tokens of one output with the vendor's stream parser and gives its protocol chunks.

Control tokens are told from text that spells them by their ids. One parser serves one output, so answers of one
request never mix.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from halocline.engine.detokenizer import REPLACEMENT, Detokenizer
from halocline.engine.logprob_values import TokenLogprob, json_logprob
from halocline.engine.prompt import Prompter
from halocline.serving.engine_client import TokenDelta
from halocline.serving.errors import ApiError

__all__ = ["THINK_END", "OutputParser", "Vocabulary", "output_error"]

logger = logging.getLogger(__name__)

THINK_END = "</think>"
MARKUP = "｜DSML｜"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What the parser needs to know of the checkpoint's tokens.

    Attributes:
        prompter: Holds the tokenizers.
        silent_ids: Tokens that are never text: the model's end tokens and its BOS.
        think_end: Token that ends the reasoning, or -1.
        markup: Token that stands in every tag of tool calls, or -1.
    """

    prompter: Prompter
    silent_ids: frozenset[int]
    think_end: int
    markup: int

    @classmethod
    def of(cls, prompter: Prompter, eos_ids: Sequence[int]) -> Vocabulary:
        """The vocabulary of a checkpoint."""
        return cls(
            prompter=prompter,
            silent_ids=frozenset((*eos_ids, prompter.bos_id)),
            think_end=prompter.tokenizer.control_ids.get(THINK_END, -1),
            markup=prompter.tokenizer.control_ids.get(MARKUP, -1),
        )


class OutputParser:
    """Turns the tokens of one output into chunks of its protocol.

    Attributes:
        num_tokens: Tokens taken, end tokens included; those after a stop string are not.
        num_reasoning_tokens: Of these, tokens of the reasoning.
        stopped_early: Whether it ended here while the engine goes on.
    """

    __slots__ = (
        "_detokenizer",
        "_in_reasoning",
        "_is_over",
        "_parses_calls",
        "_previous",
        "_processor",
        "_stop_ids",
        "_tag",
        "_unclear",
        "_vocabulary",
        "_wants_logprobs",
        "num_reasoning_tokens",
        "num_tokens",
        "stopped_early",
    )

    def __init__(
        self,
        generator: Any,
        parsing: recipe.ParsingOptions,
        vocabulary: Vocabulary,
        *,
        stop_ids: Sequence[int] = (),
        wants_logprobs: bool = False,
    ) -> None:
        """Starts before the first token.

        Args:
            generator: A chunk generator of the recipe; it is used up.
            parsing: How the output is taken apart.
            vocabulary: Of the checkpoint.
            stop_ids: Tokens that end the output and are not part of its text.
            wants_logprobs: Whether chunks carry log-probabilities.
        """
        self._processor = recipe.StreamProcessor(generator, parsing, vocabulary.prompter.recipe_tokenizer)
        self._vocabulary = vocabulary
        self._stop_ids = frozenset(stop_ids)
        self._wants_logprobs = wants_logprobs
        self._parses_calls = parsing.parse_tool_calls
        stage = parsing.thinking_initial_stage
        self._in_reasoning = stage is not None and bool(stage.starts_in_reasoning())
        self._tag: list[int] | None = None
        self._previous = -1
        self._detokenizer: Detokenizer | None = None
        self._unclear = ""
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._is_over = False
        self.stopped_early = False

    def is_over(self) -> bool:
        """Whether the output has ended: by the engine, or at a stop string."""
        return self._is_over

    def begin(self, prompt_tokens: int, cached_tokens: int, fingerprint: str) -> list[Any]:
        """Chunks that stand before the first token."""
        usage = recipe.PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        ready = recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=fingerprint or None)
        return list(self._processor.push(ready))

    def push(self, delta: TokenDelta) -> list[Any]:
        """Chunks of new tokens, and of the end if they are the last."""
        chunks: list[Any] = []
        silent = self._vocabulary.silent_ids
        last = len(delta.token_ids) - 1
        ends_by_token = delta.finish_reason == "stop"
        for place, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if self._in_reasoning:
                self._in_reasoning = token_id != self._vocabulary.think_end
                self.num_reasoning_tokens += self._in_reasoning
            if token_id in silent or (ends_by_token and place == last and token_id in self._stop_ids):
                continue
            logprobs = [_logprob(delta.logprobs[place])] if self._wants_logprobs and delta.logprobs else None
            chunks += self._processor.push(recipe.InferenceChunk.tokens([token_id], logprobs))
            self._track(token_id)
            self._track_tag(token_id)
            if self._processor.finished:
                self._is_over = True
                self.stopped_early = delta.finish_reason is None
                return chunks
        if delta.finish_reason is not None:
            chunks += self._end(delta.finish_reason)
        return chunks

    def _end(self, reason: str) -> list[Any]:
        """Chunks of the end, with the text that the parser would drop.

        An output that ends inside a call was cut, whatever the model thought: its arguments are no JSON.
        """
        chunks: list[Any] = []
        if reason == "stop" and self._ends_in_a_call():
            reason = "length"
        rest = self._unclear + (self._detokenizer.flush() if self._detokenizer is not None else "")
        if rest:
            chunks += self._processor.push(recipe.InferenceChunk.text(rest))
        if not self._processor.finished:
            reasons = recipe.InferenceFinishReason
            chunks += self._processor.push(
                recipe.InferenceChunk.finish(reasons.Length if reason == "length" else reasons.Stop)
            )
        chunks += self._processor.finish()
        self._is_over = True
        return chunks

    def _track(self, token_id: int) -> None:
        """Keeps the text that the parser has not given: its decoding waits at each U+FFFD (deepseek-recipe 0.2.0)."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            if self._vocabulary.prompter.tokenizer.token_bytes(token_id).isascii():
                return
            detokenizer = self._detokenizer = Detokenizer(self._vocabulary.prompter.tokenizer)
        self._unclear += detokenizer.push(token_id)
        if not detokenizer.waiting and not self._unclear.endswith(REPLACEMENT):
            self._unclear, self._detokenizer = "", None

    def _track_tag(self, token_id: int) -> None:
        """Remembers the last tag of a call: the tokens before and after its markup token."""
        if token_id == self._vocabulary.markup and not self._in_reasoning:
            self._tag = [self._previous]
        elif self._tag is not None and len(self._tag) == 1:
            self._tag.append(token_id)
        self._previous = token_id

    def _ends_in_a_call(self) -> bool:
        """Whether the last tag is not one that closes a call or all of them, `</...invoke>` or `</...tool_calls>`."""
        if self._tag is None or not self._parses_calls:
            return False
        before, *after = [self._vocabulary.prompter.tokenizer.token_bytes(one) for one in self._tag]
        return not (before.endswith(b"/") and b"".join(after).startswith((b"i", b"t")))


def _logprob(entry: TokenLogprob) -> tuple[float, list[tuple[int, float]]]:
    """As the recipe takes it; JSON cannot carry minus infinity."""
    return json_logprob(entry.logprob), [(token_id, json_logprob(value)) for token_id, value in entry.top]


def output_error(delta: TokenDelta) -> ApiError | None:
    """The error that a delta tells of, if any; what the engine said is for the log alone."""
    if delta.finish_reason == "error" or (delta.finish_reason is not None and "error" in delta.facts):
        logger.warning("a generation failed: %s", delta.facts.get("error"))
        return ApiError(500, "the generation failed; the server's log says why", code="generation_failed")
    if delta.finish_reason == "abort":
        return ApiError(499, "the request was aborted", code="aborted")
    return None
