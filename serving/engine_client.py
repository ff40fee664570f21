"""What the HTTP side sees of the engine: requests in, tokens out, counts and health. Free of torch.

The engine itself runs in a process of its own (`halocline.serving.engine_process`); nothing here waits for it but the
streams of those who asked.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from halocline.engine.admission import ModelLimits
from halocline.engine.logprob_values import TokenLogprob
from halocline.engine.results import FinishReason
from halocline.engine.sampling_params import SamplingParams
from halocline.serving.errors import ApiError
from halocline.serving.grammar_spec import GrammarSpec

__all__ = [
    "MAX_BACKLOG",
    "EngineClient",
    "EngineHealth",
    "EngineInfo",
    "EngineRequest",
    "PromptFacts",
    "TokenDelta",
    "TokenStream",
]

MAX_BACKLOG = 8192
"""Tokens of one request that may wait for a slow client before the request is given up; of several outputs, more."""

_BACKLOG_OF_EACH = 1024


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One prompt for the engine, checked.

    Attributes:
        id: Name of the request, as the caller will see it.
        prompt_ids: Token ids.
        params: How to generate, without a token mask: the engine makes it of `grammar`.
        grammar: Restriction of the output, or None.
        packed_ids: The token ids as int32, packed where the request is made: beside the event loop.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    grammar: GrammarSpec | None = None
    packed_ids: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed_ids", array("i", self.prompt_ids).tobytes())


class TokenDelta(NamedTuple):
    """News of one output of a request.

    Attributes:
        output: Which of the n outputs.
        token_ids: New tokens; a stop token is among them.
        logprobs: Of these tokens, if asked.
        finish_reason: On the last delta of this output.
        facts: Besides: `cached_tokens` on the first delta; `prompt_logprobs` on the first, if asked; `error` on the
            last, where there is one.
    """

    output: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    facts: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class PromptFacts:
    """What it takes to make prompts for the engine's model and to read its output.

    Attributes:
        tokenizer: Text of tokenizer.json.
        bos_id: Token that begins a prompt.
        model_name: Name of the checkpoint.
        effort: Reasoning effort of chat turns that state none.
    """

    tokenizer: str
    bos_id: int
    model_name: str
    effort: str


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What the engine says of itself once it is ready.

    Attributes:
        limits: Vocabulary, context and end tokens.
        prompts: For those who make prompts.
        facts: For /server_info: kernel table, settings with their sources, memory plan.
        fingerprint: Names the combination of code, model and kernels in answers.
    """

    limits: ModelLimits
    prompts: PromptFacts
    facts: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """Whether the engine is alive and stepping; `problem` says why not."""

    ok: bool
    problem: str | None = None


class TokenStream:
    """The outputs of one request as they come. Closing it before its end aborts the request.

    A stream whose reader does not keep up is given up, see `MAX_BACKLOG`, so that memory stays bounded.
    """

    __slots__ = ("_abort", "_backlog", "_failure", "_max_backlog", "_num_open", "_pending", "_waiter")

    def __init__(self, num_outputs: int, abort: Callable[[int | None], None]) -> None:
        """Starts empty; `abort` ends one output of the request, or all of them for None."""
        self._abort = abort
        self._num_open = num_outputs
        self._pending: list[TokenDelta] = []
        self._backlog = 0
        self._max_backlog = max(MAX_BACKLOG, _BACKLOG_OF_EACH * num_outputs)
        self._failure: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the engine has nothing more for this request."""
        return self._num_open <= 0 or self._failure is not None

    @property
    def is_drained(self) -> bool:
        """Whether everything of a finished request was read."""
        return self._num_open <= 0 and not self._pending

    def put(self, delta: TokenDelta) -> None:
        """Takes news from the engine."""
        if self._failure is not None:
            return
        self._pending.append(delta)
        self._backlog += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._num_open -= 1
        if self._backlog > self._max_backlog and self._num_open > 0:
            self._abort(None)
            self.fail(ApiError(408, "the client reads too slowly; the request was given up", code="slow_client"))
            return
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with an error; what was pending is dropped."""
        self._failure = error
        self._pending.clear()
        self._wake()

    async def read(self) -> list[TokenDelta]:
        """Everything that came since the last call, at least one delta.

        Raises:
            ApiError: The request failed.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            assert self._num_open > 0, "the stream has ended"
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, []
        self._backlog = 0
        return pending

    def stop(self, index: int) -> None:
        """Tells the engine that one output has ended, for example at a stop string."""
        self._abort(index)

    def close(self) -> None:
        """Aborts what is still being generated."""
        if not self.is_finished:
            self._abort(None)
            self._num_open = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(Protocol):
    """An engine, wherever it runs."""

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: started, alive, not stopped."""
        ...

    def submit(self, request: EngineRequest) -> TokenStream:
        """Hands over a request; its tokens come by the stream.

        Raises:
            ApiError: The engine is not there.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a request; whoever waits for it gets an error. False if there is none of that name."""
        ...

    def abort_all(self) -> int:
        """Ends every request; returns how many there were."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        ...

    def health(self) -> EngineHealth:
        """Alive and stepping, or why not."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """The engine's last counts."""
        ...

    async def start(self) -> None:
        """Starts the engine and waits until it is ready.

        Raises:
            HaloclineError: It could not start.
        """
        ...

    async def stop(self) -> None:
        """Ends the engine."""
        ...
