"""What the writers of protocols with one answer and named events have in common: responses and messages."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import deepseek_recipe as recipe

from halocline.serving.engine_client import TokenDelta
from halocline.serving.output_parser import OutputParser, Vocabulary, output_error
from halocline.serving.reply import ServedModel, TokenCounts
from halocline.serving.turns import Turn

__all__ = ["SingleWriter"]


class SingleWriter(ABC):
    """Passes the recipe's events on; those that carry facts of the whole answer go through `patch` first.

    Attributes:
        response_class: The recipe's class that adds events up to the whole answer.
        patched: Beginnings of the events that `patch` completes.
    """

    response_class: Any
    patched: tuple[str, ...]

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        turn: Turn,
        vocabulary: Vocabulary,
        generator: Any,
        *,
        stop_ids: tuple[int, ...],
        stream: bool,
        wants_logprobs: bool = False,
    ) -> None:
        self.stopped: list[tuple[int, int]] = []
        self.counts = TokenCounts(prompt=len(turn.prompt.token_ids))
        self.num_events = 0
        self._model = model
        self._stream = stream
        self._begun = False
        self._parser = OutputParser(
            generator, turn.parsing, vocabulary, stop_ids=stop_ids, wants_logprobs=wants_logprobs
        )
        self._whole: recipe.ResponsesResponse | recipe.MessagesResponse = self.response_class(
            answer_id, model.name, 0, 0, 0
        )

    def push(self, prompt: int, delta: TokenDelta) -> list[bytes]:
        """Events of new tokens."""
        del prompt  # there is one
        parser = self._parser
        if parser.is_over():
            return []
        failure = output_error(delta)
        if failure is not None:
            raise failure
        chunks = []
        if not self._begun:
            self._begun = True
            self.counts.cached = int(delta.facts.get("cached_tokens", 0))
            chunks = parser.begin(self.counts.prompt, self.counts.cached, self._model.fingerprint)
        chunks += parser.push(delta)
        self.counts.completion = parser.num_tokens
        self.counts.reasoning = parser.num_reasoning_tokens
        if parser.is_over() and parser.stopped_early:
            self.stopped.append((0, 0))
        if not self._stream:
            for chunk in chunks:
                self._whole.accumulate(chunk)
            return []
        self.num_events += len(chunks)
        return [self._event(chunk) for chunk in chunks]

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended."""
        return self._parser.is_over()

    def end(self) -> list[bytes]:
        """These protocols have no mark of the end besides their last event."""
        return []

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        return self.patch_whole(json.loads(self._whole.to_json()))

    @abstractmethod
    def patch(self, event: dict[str, Any]) -> dict[str, Any]:
        """Completes an event."""

    @abstractmethod
    def patch_whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Completes the whole answer."""

    def _event(self, chunk: Any) -> bytes:
        text = chunk.to_json()
        if text.startswith(self.patched):
            text = json.dumps(self.patch(json.loads(text)), ensure_ascii=False, separators=(",", ":"))
        return f"event: {self.response_class.sse_event_name(chunk)}\ndata: {text}\n\n".encode()
