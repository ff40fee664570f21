"""What a generation gives back: pieces while it runs, a whole result at its end. Plain data, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from halocline.engine.logprob_values import TokenLogprob, json_logprob

__all__ = ["CompletionOutput", "FinishReason", "OutputDelta", "RequestOutput", "Timings", "ToolCall", "Usage"]

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
"""Why an output ended: a stop token or text; a limit; complete tool calls; the caller left; it failed."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call that the model made.

    Attributes:
        id: Made up by the parser; a tool's answer names it.
        name: Of the function.
        arguments: JSON text of an object. Incomplete when the output was cut.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens counted for a request.

    Attributes:
        prompt_tokens: Of the prompt, once for all outputs.
        cached_tokens: Of these, how many the prefix cache held.
        completion_tokens: Generated, over all outputs, stop tokens included.
        reasoning_tokens: Of these, how many were reasoning.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds that a request spent.

    Attributes:
        queue_s: From its arrival until its first token was computed.
        prefill_s: From then until the first token came out.
        decode_s: From then until the last token came out.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OutputDelta:
    """What was added to an output.

    Attributes:
        index: Which of the n outputs.
        token_ids: New tokens; their text may come later, when characters are complete.
        text: New text of a completion.
        reasoning: New reasoning of a chat turn.
        content: New answer text of a chat turn.
        tool_calls: Tool calls of a chat turn so far, when they changed, else empty.
        logprobs: Of `token_ids`, if asked.
        finish_reason: On the last delta of this output.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One finished output.

    Attributes:
        index: Which of the n outputs.
        token_ids: All tokens generated, a stop token included.
        text: Their text without the stop token, the stop string and what follows it. Of a chat turn, `content`.
        finish_reason: Why it ended.
        stop_reason: The stop token or stop text that ended it; None for the model's own end token.
        error: What failed, when the reason is `error`.
        reasoning: Of a chat turn that thought; None where thinking was off.
        content: Answer of a chat turn.
        tool_calls: Of a chat turn.
        logprobs: One entry for each token, if asked.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason = "stop"
    stop_reason: int | str | None = None
    error: str | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: Its name.
        prompt_token_ids: The prompt as the model read it.
        outputs: One for each of n, in order.
        usage: Tokens counted.
        timings: Seconds spent, of the output that took longest.
        seed: Seed that names the draws, also when it was chosen here.
        prompt_logprobs: One entry for each prompt token but the first, if asked.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    seed: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    def to_json(self) -> dict[str, Any]:
        """As values that JSON can carry: log-probabilities of minus infinity become `JSON_FLOOR`."""
        return {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [_output_json(output) for output in self.outputs],
            "usage": {**vars(self.usage), "total_tokens": self.usage.total_tokens},
            "timings": vars(self.timings),
            "seed": self.seed,
            "prompt_logprobs": _logprobs_json(self.prompt_logprobs),
        }


def _output_json(output: CompletionOutput) -> dict[str, Any]:
    return {
        **vars(output),
        "token_ids": list(output.token_ids),
        "tool_calls": [vars(call) for call in output.tool_calls],
        "logprobs": _logprobs_json(output.logprobs),
    }


def _logprobs_json(logprobs: tuple[TokenLogprob, ...] | None) -> list[dict[str, Any]] | None:
    if logprobs is None:
        return None
    return [
        {
            "token_id": entry.token_id,
            "logprob": json_logprob(entry.logprob),
            "top": [[token_id, json_logprob(value)] for token_id, value in entry.top],
        }
        for entry in logprobs
    ]
