"""From a request's updates to text: one assembler for each output of a request, and the finished result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from halocline.engine.chat_stream import ChatStream
from halocline.engine.detokenizer import TextStream
from halocline.engine.logprob_values import TokenLogprob
from halocline.engine.prompt import ChatPrompt, Prompter
from halocline.engine.request import Request, RequestUpdate
from halocline.engine.results import CompletionOutput, FinishReason, OutputDelta, RequestOutput, Timings, Usage

__all__ = ["OutputAssembler", "request_output"]


class OutputAssembler:
    """Text of one output. Stop strings are found here; the engine knows tokens only.

    Attributes:
        request: What the engine works on.
        finish_reason: Once the output has ended, whatever the engine still computes.
    """

    def __init__(self, request: Request, prompter: Prompter, chat: ChatPrompt | None = None) -> None:
        params = request.admitted.params
        self.request = request
        self.finish_reason: FinishReason | None = None
        self._stop_ids = frozenset(request.admitted.stop_ids)
        self._named_stop_ids = frozenset(params.stop_token_ids)
        self._wants_logprobs = params.logprobs is not None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = ""
        stop, min_tokens = params.stop, params.min_tokens
        self._chat = None if chat is None else ChatStream(prompter, chat, stop, min_tokens)
        self._thinks = chat is not None and chat.thinking
        self._completion = TextStream(prompter.tokenizer, stop, min_tokens)

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the output."""
        return (self._completion if self._chat is None else self._chat).stop_found

    def update(self, update: RequestUpdate) -> OutputDelta:
        """Takes what a step brought. Updates after the end are dropped."""
        if self.finish_reason is not None:
            return OutputDelta(index=self.request.index)
        shown = update.token_ids
        if update.finish_reason == "stop" and shown and shown[-1] in self._stop_ids:
            shown = shown[:-1]
        delta = self._push(shown)
        if self.stop_found is not None:
            num_taken = (self._completion if self._chat is None else self._chat).num_tokens - len(self._token_ids)
            update = RequestUpdate(update.token_ids[:num_taken], update.logprobs[:num_taken], "stop")
        self._token_ids.extend(update.token_ids)
        self._logprobs.extend(update.logprobs)
        if update.finish_reason is not None:
            delta = self._finish(update.finish_reason, delta)
        return replace(
            delta,
            index=self.request.index,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            finish_reason=self.finish_reason,
        )

    def result(self) -> CompletionOutput:
        """The finished output."""
        assert self.finish_reason is not None, "the output has not ended"
        chat = self._chat
        return CompletionOutput(
            index=self.request.index,
            token_ids=tuple(self._token_ids),
            text=self._text if chat is None else chat.content,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason(),
            error=self.request.error,
            reasoning=chat.reasoning if chat is not None and self._thinks else None,
            content=None if chat is None else chat.content,
            tool_calls=() if chat is None else chat.tool_calls,
            logprobs=tuple(self._logprobs) if self._wants_logprobs else None,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the output."""
        return len(self._token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """Of these, how many were reasoning."""
        return 0 if self._chat is None else self._chat.num_reasoning_tokens

    def _push(self, token_ids: Sequence[int]) -> OutputDelta:
        if self._chat is not None:
            return self._chat.push(token_ids)
        text = self._completion.push(token_ids)
        self._text += text
        return OutputDelta(text=text)

    def _finish(self, reason: FinishReason, delta: OutputDelta) -> OutputDelta:
        """Adds what was held back to the last delta."""
        self.finish_reason = reason
        if self._chat is None:
            rest = self._completion.finish()
            self._text += rest
            return replace(delta, text=delta.text + rest)
        last = self._chat.finish(reason)
        if reason == "stop" and self._chat.called_tools:
            self.finish_reason = "tool_calls"
        return replace(
            delta,
            reasoning=delta.reasoning + last.reasoning,
            content=delta.content + last.content,
            tool_calls=last.tool_calls or delta.tool_calls,
        )

    def _stop_reason(self) -> int | str | None:
        if self.stop_found is not None:
            return self.stop_found
        last = self._token_ids[-1] if self._token_ids else None
        return last if self.finish_reason in ("stop", "tool_calls") and last in self._named_stop_ids else None


def request_output(assemblers: Sequence[OutputAssembler]) -> RequestOutput:
    """The result of a request whose outputs have all ended."""
    requests = [assembler.request for assembler in assemblers]
    first = requests[0]
    timings = [_timings(request) for request in requests]
    return RequestOutput(
        request_id=first.id,
        prompt_token_ids=first.admitted.prompt_ids,
        outputs=tuple(assembler.result() for assembler in assemblers),
        usage=Usage(
            prompt_tokens=len(first.admitted.prompt_ids),
            cached_tokens=first.num_cached_tokens,
            completion_tokens=sum(assembler.num_tokens for assembler in assemblers),
            reasoning_tokens=sum(assembler.num_reasoning_tokens for assembler in assemblers),
        ),
        timings=max(timings, key=lambda one: one.queue_s + one.prefill_s + one.decode_s),
        seed=first.admitted.seed,
        prompt_logprobs=(tuple(first.prompt_logprobs) if first.admitted.params.prompt_logprobs is not None else None),
    )


def _timings(request: Request) -> Timings:
    """Seconds between the times that a request carries; 0 for stages that it never reached."""
    start = request.start_time or request.finish_time
    first_token = request.first_token_time or request.finish_time
    return Timings(
        queue_s=max(start - request.arrival_time, 0.0),
        prefill_s=max(first_token - start, 0.0),
        decode_s=max(request.finish_time - first_token, 0.0),
    )
