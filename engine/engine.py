"""Engine: requests in, tokens out. One step at a time, driven by whoever owns it; not thread-safe.

A step asks the scheduler for work, launches it, and hands out the tokens of the step before: while the device works,
the host reads, checks and plans. Whatever ends a request (a stop token, an abort, a deadline, an error, a callback that
raises) frees all that it held.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.engine.admission import ModelLimits
from halocline.engine.cache_manager import CacheManager, CacheUsage
from halocline.engine.debug_tags import TaggedModel
from halocline.engine.memory_plan import plan_memory
from halocline.engine.request import Phase, Request, RequestUpdate
from halocline.engine.runner import ModelRunner
from halocline.engine.scheduler import Scheduler
from halocline.hal.errors import MachineError, lines

if TYPE_CHECKING:
    from halocline.engine.batch import Batch
    from halocline.engine.config import EngineConfig
    from halocline.engine.graphs import GraphCapture
    from halocline.engine.logprob_values import TokenLogprob
    from halocline.engine.results import FinishReason
    from halocline.engine.runner import Flight
    from halocline.engine.sampler import Sampler
    from halocline.models.interface import CausalModel

__all__ = ["Engine", "EngineHealth", "EngineStats"]

logger = logging.getLogger(__name__)

_FAILURES_UNTIL_DEAD = 3


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts for reports and metrics.

    Attributes:
        unfinished: Requests that have not ended.
        running: Of these, requests that hold a row.
        steps, decode_tokens, prefill_tokens, preemptions: Since start.
        finished: Requests ended since start, by reason.
        lookups, hits, cached_tokens, evictions: Of the prefix cache since start.
        cache: Pages and slots now.
        cache_bytes: Bytes of all caches.
    """

    unfinished: int
    running: int
    steps: int
    decode_tokens: int
    prefill_tokens: int
    preemptions: int
    finished: Mapping[str, int]
    lookups: int
    hits: int
    cached_tokens: int
    evictions: int
    cache: CacheUsage
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """Whether the engine can serve; `problem` says why not."""

    ok: bool
    problem: str | None = None


class Engine:
    """Requests, their scheduler, the model's runner."""

    def __init__(
        self,
        model: CausalModel,
        sampler: Sampler,
        config: EngineConfig,
        *,
        device: str = "cpu",
        capture: GraphCapture | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Plans memory, allocates everything and warms up.

        Args:
            model: The network.
            sampler: With as many rows as `config.max_requests`.
            config: What the caller decided.
            device: Where the model runs, in torch's words.
            capture: The backend's graphs, or None to run eagerly.
            clock: Seconds; deadlines and timings are in its time.

        Raises:
            OutOfPagesError: If a request of the longest context does not fit.
        """
        config = config.resolve(model.max_positions)
        if config.debug_tags:
            model = TaggedModel(model)
        assert config.max_positions is not None
        assert config.num_snapshots is not None
        self.config = config
        self.memory = plan_memory(
            model.cache_plan(window_page_rows=config.window_page_rows, page_tokens=config.page_tokens),
            config.cache_bytes,
            max_requests=config.max_requests,
            max_positions=config.max_positions,
            max_step_tokens=config.max_step_tokens,
            num_snapshots=config.num_snapshots,
            max_token_pages=config.max_token_pages,
        )
        self.limits = ModelLimits(vocab_size=model.vocab_size, max_tokens=config.max_positions, eos_ids=config.eos_ids)
        self.cache = CacheManager(self.memory, prefix_caching=config.prefix_caching)
        self.sampler = sampler
        self.scheduler = Scheduler(config, self.cache, self, self._expire)
        self.runner = ModelRunner(
            model, self.memory, self.cache.table, sampler, config, device=torch.device(device), capture=capture
        )
        self.clock = clock
        self._flights: deque[Flight] = deque()
        self._updates: list[tuple[Request, RequestUpdate]] = []
        self._special_ids = {-1}  # a token that failed, and all that end some request
        self._finished: dict[str, int] = {}
        self._num_masked = 0
        self._failures = 0
        self._last_progress = clock()
        self.warm_up_seconds = self.runner.warm_up()
        logger.info("%s", self.memory.describe())

    # ---- requests -----------------------------------------------------------------------------------------------

    def add(self, request: Request, *, leader: Request | None = None) -> None:
        """Queues a request that `admit` has checked against `limits`.

        Args:
            request: New. Its tokens and its end are told to `on_update`, from within `step`.
            leader: An earlier output of the same prompt: this one waits for its prefill and finds the prefix cached.
        """
        if self.scheduler.num_unfinished == 0:
            self._last_progress = self.clock()
        self._special_ids.update(request.stop_ids)
        self._num_masked += request.matcher is not None
        self.scheduler.add(request, leader=leader)

    def abort(self, request: Request) -> None:
        """Ends a request at once, in whatever phase; one that has ended is left alone."""
        self._finish(request, "abort")

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.num_unfinished > 0 or bool(self._flights) or bool(self._updates)

    def run(self) -> None:
        """Steps until nothing is left."""
        while self.has_work:
            self.step()

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request without a further token."""
        if not request.is_finished:
            self._end(request, reason, error)
            self._tell(request, RequestUpdate((), (), reason))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason, request.error = reason, error
        request.finish_time = self.clock()
        self.scheduler.finish(request)
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._num_masked -= request.matcher is not None

    # ---- one step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launches the next step, reads the one before, and tells each request what is new."""
        if self._num_masked:  # a token mask needs the last token before the next one is drawn
            self._collect_flights(0)
        batch = self.scheduler.schedule(self.clock())
        launched = batch.num_tokens > 0 and self._launch(batch)
        self._collect_flights(int(launched and self.config.overlap))
        if launched:
            self.runner.copy_state(self.scheduler.remember(batch))
        self._deliver()

    def _launch(self, batch: Batch) -> bool:
        try:
            flight = self.runner.launch(batch)
        except Exception as error:  # whatever the device raises: its requests fail, the engine lives
            logger.exception("a step of %d tokens failed", batch.num_tokens)
            self._failures += 1
            self.cache.end_restores(batch.restores)
            for request in batch.requests():
                self._finish(request, "error", f"the step failed: {type(error).__name__}: {error}")
            self.runner.builder.resync()
            return False
        self._failures = 0
        self._last_progress = self.clock()
        self.scheduler.advance(batch)
        self._flights.append(flight)
        return True

    def _collect_flights(self, num_left: int) -> None:
        while len(self._flights) > num_left:
            self._collect(self._flights.popleft())

    def _collect(self, flight: Flight) -> None:
        """Reads a step's tokens and ends the requests that they end."""
        flight.wait()
        for request, start, scores in flight.prompt_scores:
            if start <= len(request.prompt_logprobs):
                request.prompt_logprobs[start:] = scores.to_host().values()
        tokens: list[int] = flight.ids.tolist()
        logprobs = flight.logprobs.to_host() if flight.logprobs is not None else {}
        decode, special_ids = Phase.DECODE, self._special_ids
        for index, (request, token_id) in enumerate(zip(flight.batch.sampled_requests, tokens, strict=True)):
            if request.phase is decode and not request.is_watched and token_id not in special_ids:
                request.output_ids.append(token_id)
            elif request.phase is not Phase.FINISHED:
                self._take_token(request, token_id, logprobs.get(index))
        for chunk in flight.batch.chunks:
            request = chunk.request
            if not chunk.samples and chunk.end == request.prefill_end and request.phase is Phase.DRAINING:
                self._finish(request, "length")  # it only wanted its prompt read, and this was the end of it

    def _take_token(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> None:
        """Adds a token that may end the request, fail it, or has to be told to somebody."""
        if token_id < 0:
            self._fail_bad_row(request)
            return
        request.output_ids.append(token_id)
        if not request.first_token_time:
            request.first_token_time = self.clock()
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

    def _deliver(self) -> None:
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
                self._finish(request, "error", f"its callback raised {type(error).__name__}: {error}")

    # ---- failures -----------------------------------------------------------------------------------------------

    def _fail_bad_row(self, request: Request) -> None:
        """Ends a request whose logits were not numbers; nobody may resume on its rows."""
        self.cache.discard(request)
        self._finish(request, "error", "the model gave no numbers for this request (NaN logits)")

    def _expire(self, request: Request) -> None:
        self._finish(request, "abort", "its deadline has passed")

    # ---- rows, as the scheduler tells of them ---------------------------------------------------------------------

    def take(self, row: int, request: Request) -> None:
        """Gives the sampler the parameters of a row."""
        self.sampler.set_row(
            row,
            request.admitted.params,
            request.admitted.prompt_ids,
            request.output_ids,
            stop_ids=(*self.config.eos_ids, *request.admitted.params.stop_token_ids),
            matcher=request.matcher,
        )

    def leave(self, row: int) -> None:
        """Frees a row of the sampler."""
        self.sampler.clear_row(row)

    # ---- reports --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts now."""
        counters = self.scheduler.counters
        prefix = self.cache.prefix.counters if self.cache.prefix is not None else None
        return EngineStats(
            unfinished=self.scheduler.num_unfinished,
            running=self.cache.table.num_rows - self.cache.table.num_free,
            steps=counters.steps,
            decode_tokens=counters.decode_tokens,
            prefill_tokens=counters.prefill_tokens,
            preemptions=counters.preemptions,
            finished=dict(self._finished),
            lookups=prefix.lookups if prefix else 0,
            hits=prefix.hits if prefix else 0,
            cached_tokens=prefix.cached_tokens if prefix else 0,
            evictions=prefix.evictions if prefix else 0,
            cache=self.cache.usage(),
            cache_bytes=self.memory.total_bytes,
        )

    def health(self, *, stuck_after: float = 60.0) -> EngineHealth:
        """Ill when steps fail one after the other, or when there is work and no step was launched for a while."""
        if self._failures >= _FAILURES_UNTIL_DEAD:
            return EngineHealth(ok=False, problem=f"the last {self._failures} steps failed")
        idle = self.clock() - self._last_progress
        if self.scheduler.num_unfinished and idle > stuck_after:
            return EngineHealth(ok=False, problem=f"{self.scheduler.num_unfinished} requests, no step for {idle:.0f} s")
        return EngineHealth(ok=True)

    def check_idle(self) -> None:
        """Checks that nothing is lost; with nothing running, that everything is free or in the prefix cache.

        Raises:
            MachineError: If pages, slots or rows leaked.
        """
        try:
            self.cache.check()
        except AssertionError as error:
            raise MachineError(lines("the engine lost count of its cache", found=error)) from error
