"""Engine: requests in, tokens out. One step at a time, driven by whoever owns it; not thread-safe.

A step asks the scheduler for work, launches it, and hands out the tokens of the step before: while the device works,
the host reads, checks and plans. Whatever ends a request (a stop token, an abort, a deadline, an error, a callback that
raises) frees all that it held.

With several ranks this is the one that schedules and samples; the others carry out its plans
(`halocline.engine.ranks`). With data-parallel attention it holds the requests of all attention groups.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.engine.admission import ModelLimits
from halocline.engine.cache_manager import CacheUsage
from halocline.engine.debug_tags import TaggedModel
from halocline.engine.driver import StepDriver
from halocline.engine.memory_plan import plan_memory
from halocline.engine.request import Request
from halocline.engine.request_group import RequestGroup
from halocline.engine.runner import ModelRunner
from halocline.hal.errors import ConfigError, MachineError, lines

if TYPE_CHECKING:
    from halocline.engine.batch import Batch
    from halocline.engine.config import EngineConfig
    from halocline.engine.graphs import GraphCapture
    from halocline.engine.ranks.lead import Lead
    from halocline.engine.sampler import Sampler
    from halocline.engine.warm_up import Builder
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
    """Requests in groups, and what drives their steps.

    Attributes:
        config: Resolved; sizes are those of one attention group.
        memory: Pages and slots of one attention group.
        limits: What bounds a request.
        groups: One for each attention group; a process alone has one.
        sampler: Of all groups.
        runner: This rank's.
        clock: Seconds; deadlines and timings are in its time.
        warm_up_seconds: Taken by the first steps and by recording graphs.
    """

    def __init__(
        self,
        model: CausalModel,
        sampler: Sampler,
        config: EngineConfig,
        *,
        device: str = "cpu",
        capture: GraphCapture | None = None,
        clock: Callable[[], float] = time.monotonic,
        lead: Lead | None = None,
        build: Builder | None = None,
    ) -> None:
        """Plans memory, allocates everything and warms up.

        Args:
            model: The network.
            sampler: With as many rows as all groups: `config.max_requests` each.
            config: What the caller decided.
            device: Where the model runs, in torch's words.
            capture: The backend's graphs, or None to run eagerly.
            clock: Seconds; deadlines and timings are in its time.
            lead: The other ranks, or None for one process.
            build: Compiles in parallel what the warm-up launches, or None.

        Raises:
            OutOfPagesError: If a request of the longest context does not fit.
        """
        config = config.resolve(model.max_positions)
        if config.debug_tags:
            if lead is not None:
                raise ConfigError("debug_tags checks the rows of one process; run it without further ranks")
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
        self.sampler = sampler
        self.clock = clock
        self.groups: Sequence[RequestGroup] = [
            RequestGroup(config, self.memory, sampler, clock, first_row=group * config.max_requests)
            for group in range(lead.num_groups if lead is not None else 1)
        ]
        if lead is not None:
            lead.start(config, self.memory)
        self._lead = lead
        self.runner = ModelRunner(
            model,
            self.memory,
            config,
            device=torch.device(device),
            capture=capture,
            exchange=lead.exchange if lead is not None else None,
            build=build,
        )
        self.driver = StepDriver(
            self.runner,
            sampler,
            [group.cache.table for group in self.groups],
            config,
            sender=lead.sender if lead is not None else None,
        )
        self._failures = 0
        self._last_progress = clock()
        self.warm_up_seconds = self.runner.warm_up()
        logger.info("%s", self.memory.describe())

    def close(self) -> None:
        """Lets the other ranks go, if there are any. A second call does nothing."""
        if self._lead is not None:
            self._lead.close()
            self.runner.graphs.clear()

    # ---- requests -----------------------------------------------------------------------------------------------

    def add(self, request: Request, *, leader: Request | None = None) -> None:
        """Queues a request that `admit` has checked against `limits`.

        Args:
            request: New. Its tokens and its end are told to `on_update`, from within `step`.
            leader: An earlier output of the same prompt: this one waits for its prefill and finds the prefix cached.
        """
        if self._num_unfinished == 0:
            self._last_progress = self.clock()
        if leader is not None:
            request.group = leader.group
        elif len(self.groups) > 1:
            request.group = min(range(len(self.groups)), key=lambda number: self.groups[number].cost_of(request))
        self.groups[request.group].add(request, leader=leader)

    def abort(self, request: Request) -> None:
        """Ends a request at once, in whatever phase; one that has ended is left alone."""
        self.groups[request.group].finish(request, "abort")

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return any(group.has_work for group in self.groups)

    @property
    def _num_unfinished(self) -> int:
        return sum(group.scheduler.num_unfinished for group in self.groups)

    def run(self) -> None:
        """Steps until nothing is left."""
        while self.has_work:
            self.step()

    # ---- one step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launches the next step, reads the one before, and tells each request what is new."""
        groups = self.groups
        for group in groups:
            if group.num_masked:  # a token mask needs the last token before the next one is drawn
                group.collect(0)
        now = self.clock()
        batches = [group.next_batch(now) for group in groups]
        launched = any([batch.num_tokens for batch in batches]) and self._launch(batches)
        num_left = 1 if launched and self.config.overlap else 0
        for group, batch in zip(groups, batches, strict=True):
            group.collect(num_left)
            if launched:
                group.remember(batch)
            group.deliver()

    def _launch(self, batches: Sequence[Batch]) -> bool:
        try:
            flights = self.driver.launch(batches)
        except Exception as error:  # whatever the device raises: its requests fail, the engine lives
            if self._lead is not None:
                raise self._lead.explain(error) from error  # ranks are out of step: nothing can go on
            logger.exception("a step of %d tokens failed", sum(batch.num_tokens for batch in batches))
            self._failures += 1
            for group, batch in zip(self.groups, batches, strict=True):
                group.fail(batch, f"the step failed: {type(error).__name__}: {error}")
            self.driver.resync()
            return False
        self._failures = 0
        self._last_progress = self.clock()
        for group, flight in zip(self.groups, flights, strict=True):
            group.take_off(flight)
        return True

    # ---- reports --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts now, of all groups together."""
        groups = self.groups
        counters = [group.scheduler.counters for group in groups]
        prefixes = [group.cache.prefix.counters for group in groups if group.cache.prefix is not None]
        finished: Counter[str] = Counter()
        for group in groups:
            finished.update(group.finished)
        return EngineStats(
            unfinished=self._num_unfinished,
            running=sum(group.cache.table.num_rows - group.cache.table.num_free for group in groups),
            steps=max(count.steps for count in counters),
            decode_tokens=sum(count.decode_tokens for count in counters),
            prefill_tokens=sum(count.prefill_tokens for count in counters),
            preemptions=sum(count.preemptions for count in counters),
            finished=dict(finished),
            lookups=sum(prefix.lookups for prefix in prefixes),
            hits=sum(prefix.hits for prefix in prefixes),
            cached_tokens=sum(prefix.cached_tokens for prefix in prefixes),
            evictions=sum(prefix.evictions for prefix in prefixes),
            cache=CacheUsage.sum_of([group.cache.usage() for group in groups]),
            cache_bytes=self.memory.total_bytes * len(groups),
        )

    def health(self, *, stuck_after: float = 60.0) -> EngineHealth:
        """Ill when steps fail one after the other, or when there is work and no step was launched for a while."""
        if self._failures >= _FAILURES_UNTIL_DEAD:
            return EngineHealth(ok=False, problem=f"the last {self._failures} steps failed")
        idle, unfinished = self.clock() - self._last_progress, self._num_unfinished
        if unfinished and idle > stuck_after:
            return EngineHealth(ok=False, problem=f"{unfinished} requests, no step for {idle:.0f} s")
        return EngineHealth(ok=True)

    def check_idle(self) -> None:
        """Checks that nothing is lost; with nothing running, that everything is free or in the prefix cache.

        Raises:
            MachineError: If pages, slots or rows leaked.
        """
        try:
            for group in self.groups:
                group.cache.check()
        except AssertionError as error:
            raise MachineError(lines("the engine lost count of its cache", found=error)) from error
