"""RequestGroup: the requests of one attention group, their scheduler and caches, from arrival to their tokens.

One process has one group. With data-parallel attention there are several, which step together; each has pages, rows
and a prefix tree of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from halocline.engine.cache_manager import CacheManager
from halocline.engine.request import Phase, Request, RequestUpdate
from halocline.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from halocline.engine.batch import Batch
    from halocline.engine.config import EngineConfig
    from halocline.engine.driver import Flight
    from halocline.engine.logprob_values import TokenLogprob
    from halocline.engine.memory_plan import MemoryPlan
    from halocline.engine.results import FinishReason
    from halocline.engine.sampling_params import SamplingParams, TokenMatcher

__all__ = ["RequestGroup", "SamplerRows"]

logger = logging.getLogger(__name__)

# What one more request under way is worth, in tokens of prefill: see `RequestGroup.cost_of`.
_REQUEST_TOKENS = 512


class SamplerRows(Protocol):
    """The part of the sampler that keeps parameters of rows."""

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        stop_ids: Sequence[int],
        matcher: TokenMatcher | None,
    ) -> None:
        """Gives a row to a request."""
        ...

    def clear_row(self, row: int) -> None:
        """Frees a row."""
        ...


class RequestGroup:
    """Requests that share caches and rows.

    Attributes:
        cache: Pages of the rows.
        scheduler: Picks what a step works on.
        flights: Steps that were launched and not read, oldest first.
        finished: Requests ended since start, by reason.
        num_masked: Unfinished requests with a token mask.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: MemoryPlan,
        sampler: SamplerRows,
        clock: Callable[[], float],
        *,
        first_row: int = 0,
    ) -> None:
        """Starts empty.

        Args:
            config: Resolved.
            memory: Sizes of the pools.
            sampler: Keeps the parameters of rows.
            clock: Seconds.
            first_row: Where this group's rows begin among those of the sampler.
        """
        self.cache = CacheManager(memory, prefix_caching=config.prefix_caching)
        self.scheduler = Scheduler(config, self.cache, self, self._expire)
        self.flights: deque[Flight] = deque()
        self.finished: dict[str, int] = {}
        self.num_masked = 0
        self._config = config
        self._sampler = sampler
        self._clock = clock
        self._first_row = first_row
        self._updates: list[tuple[Request, RequestUpdate]] = []
        self._special_ids = {-1}  # a token that failed, and all that end some request
        self._copies: list[tuple[int, int]] = []

    # ---- requests -----------------------------------------------------------------------------------------------

    def add(self, request: Request, *, leader: Request | None = None) -> None:
        """Queues a request; with a leader, behind that request's prefill."""
        self._special_ids.update(request.stop_ids)
        self.num_masked += request.matcher is not None
        self.scheduler.add(request, leader=leader)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return self.scheduler.num_unfinished > 0 or bool(self.flights) or bool(self._updates)

    def cost_of(self, request: Request) -> int:
        """What it costs to take a request here: tokens to prefill, before it and of its own, and requests under way."""
        missing = request.num_tokens
        if self.cache.prefix is not None:
            resume = self.cache.prefix.match(request.prefix_keys(self.cache.page_tokens), missing).resume
            missing -= resume.depth * self.cache.page_tokens if resume is not None else 0
        return missing + self.scheduler.num_unread_tokens() + _REQUEST_TOKENS * self.scheduler.num_unfinished

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request without a further token; one that has ended is left alone."""
        if not request.is_finished:
            self._end(request, reason, error)
            self._tell(request, RequestUpdate((), (), reason))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason, request.error = reason, error
        request.finish_time = self._clock()
        self.scheduler.finish(request)
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.num_masked -= request.matcher is not None

    # ---- one step -----------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> Batch:
        """What the next step works on; `num_tokens` is 0 when there is nothing to do."""
        batch = self.scheduler.schedule(now)
        batch.copies = self._copies
        return batch

    def take_off(self, flight: Flight) -> None:
        """Counts a step that has been launched."""
        self._copies = []
        self.scheduler.advance(flight.batch)
        self.flights.append(flight)

    def fail(self, batch: Batch, message: str) -> None:
        """Ends the requests of a step that could not be launched."""
        self._copies = []
        self.cache.end_restores(batch.restores)
        for request in batch.requests():
            self.finish(request, "error", message)

    def collect(self, num_left: int) -> None:
        """Reads the tokens of steps in flight but the last ones."""
        while len(self.flights) > num_left:
            self._collect(self.flights.popleft())

    def remember(self, batch: Batch) -> None:
        """Stores the page boundaries that a step has reached; their state is copied before the next step."""
        self._copies = self.scheduler.remember(batch)

    def _collect(self, flight: Flight) -> None:
        """Reads a step's tokens and ends the requests that they end."""
        flight.wait()
        for rows, scores in flight.prompt_scores:
            known = rows.request.prompt_logprobs
            if rows.position <= len(known):
                known[rows.position :] = scores.to_host().values()
        tokens: list[int] = flight.ids.tolist()
        logprobs = flight.logprobs.to_host() if flight.logprobs is not None else {}
        decode, special_ids = Phase.DECODE, self._special_ids
        for index, (request, token_id) in enumerate(
            zip(flight.batch.sampled_requests, tokens, strict=True), flight.first
        ):
            if request.phase is decode and not request.is_watched and token_id not in special_ids:
                request.output_ids.append(token_id)
            elif request.phase is not Phase.FINISHED:
                self._take_token(request, token_id, logprobs.get(index))
        for chunk in flight.batch.chunks:
            request = chunk.request
            if not chunk.samples and chunk.end == request.prefill_end and request.phase is Phase.DRAINING:
                self.finish(request, "length")  # it only wanted its prompt read, and this was the end of it

    def _take_token(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> None:
        """Adds a token that may end the request, fail it, or has to be told to somebody."""
        if token_id < 0:
            self._fail_bad_row(request)
            return
        request.output_ids.append(token_id)
        if not request.first_token_time:
            request.first_token_time = self._clock()
            request.is_watched = request.on_update is not None or request.matcher is not None
        count, params = len(request.output_ids), request.admitted.params
        stops = token_id in request.stop_ids and count > params.min_tokens
        if stops or (request.matcher is not None and not request.matcher.accept(token_id)):
            self._end(request, "stop")
        elif count >= request.admitted.max_tokens:
            self._end(request, "length")
        elif request.phase is Phase.WAITING:  # preempted with this token in flight
            request.num_pending -= 1
            if request.num_pending == 0:
                self.scheduler.requeue(request)
        scored = () if logprob is None else (logprob,)
        request.output_logprobs.extend(scored)
        self._tell(request, RequestUpdate((token_id,), scored, request.finish_reason))

    def _tell(self, request: Request, update: RequestUpdate) -> None:
        if request.on_update is not None:
            self._updates.append((request, update))

    def deliver(self) -> None:
        """Calls back with what is new. A caller whose code raises loses its request; the others live."""
        updates, self._updates = self._updates, []
        for request, update in updates:
            if request.on_update is None:
                continue
            try:
                request.on_update(request, update)
            except Exception as error:
                logger.exception("a callback of request %s raised", request.id)
                request.on_update = None
                self.finish(request, "error", f"its callback raised {type(error).__name__}: {error}")

    # ---- failures -----------------------------------------------------------------------------------------------

    def _fail_bad_row(self, request: Request) -> None:
        """Ends a request whose logits were not numbers; nobody may resume on its rows."""
        self.cache.discard(request)
        self.finish(request, "error", "the model gave no numbers for this request (NaN logits)")

    def _expire(self, request: Request) -> None:
        self.finish(request, "abort", "its deadline has passed")

    # ---- rows, as the scheduler tells of them ---------------------------------------------------------------------

    def take(self, row: int, request: Request) -> None:
        """Gives the sampler the parameters of a row."""
        self._sampler.set_row(
            self._first_row + row,
            request.admitted.params,
            request.admitted.prompt_ids,
            request.output_ids,
            stop_ids=(*self._config.eos_ids, *request.admitted.params.stop_token_ids),
            matcher=request.matcher,
        )

    def leave(self, row: int) -> None:
        """Frees a row of the sampler."""
        self._sampler.clear_row(self._first_row + row)
