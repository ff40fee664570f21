"""Scheduler: which requests a step works on. Continuous batching with chunked prefill.

Order of a step: requests past their deadline end; every request that decodes gets one token; the rest of the token
budget goes to prefills under way and then to waiting requests, each in the order of the queue. Pages are taken as they
are needed: what left the window is freed first, then the prefix cache gives way, and only then the requests that come
last in the order are preempted: they lose their pages and are computed again later.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from halocline.engine.batch import Batch, Chunk
from halocline.engine.request import Phase
from halocline.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from halocline.engine.cache_manager import CacheManager
    from halocline.engine.config import EngineConfig
    from halocline.engine.request import Request

__all__ = ["Scheduler", "SchedulerCounters", "Seats"]


class Seats(Protocol):
    """Who else keeps something for each engine row: the sampler."""

    def take(self, row: int, request: Request) -> None:
        """A request got a row."""
        ...

    def leave(self, row: int) -> None:
        """A row is free again."""
        ...


@dataclass(kw_only=True)
class SchedulerCounters:
    """What happened since start: steps, their tokens, and preemptions."""

    steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Requests from arrival to their last token. It knows numbers and pages, no tensors."""

    def __init__(
        self, config: EngineConfig, cache: CacheManager, seats: Seats, expire: Callable[[Request], None]
    ) -> None:
        """Starts empty.

        Args:
            config: Resolved.
            cache: Pages of the rows.
            seats: Told of rows that are taken and left.
            expire: Called for each request whose deadline has passed; it must call `finish`.
        """
        assert config.max_chunk_tokens is not None, "a resolved configuration"
        self.cache = cache
        self.counters = SchedulerCounters()
        self.num_unfinished = 0
        self._max_step_tokens = config.max_step_tokens
        self._max_chunk_tokens = config.max_chunk_tokens
        self._seats = seats
        self._expire = expire
        self._waiting = WaitingQueue(config.priority_steps)
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        self._decode_rows = np.empty(0, dtype=np.int32)
        self._decode_tuple: tuple[int, ...] = ()
        self._decode_changed = False
        self._deadlines: list[tuple[float, tuple[int, int], Request]] = []

    # ---- arrival and end ----------------------------------------------------------------------------------------

    def add(self, request: Request, *, leader: Request | None = None) -> None:
        """Queues a request. With a leader it waits for that one's prefill, if it can then find the prefix cached."""
        self.num_unfinished += 1
        self._waiting.arrive(request, self.counters.steps)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.order, request))
        shares = self.cache.prefix is not None and len(request.prompt) > self.cache.page_tokens
        if leader is not None and shares and leader.phase in (Phase.WAITING, Phase.PREFILL):
            leader.followers.append(request)
        else:
            self._waiting.push(request)

    def finish(self, request: Request) -> None:
        """Ends a request in whatever phase; everything it holds is free afterwards. A second call does nothing."""
        if request.is_finished:
            return
        if request.row >= 0:
            self._leave_row(request)
        request.phase = Phase.FINISHED
        self.num_unfinished -= 1
        self._release_followers(request)

    def num_unread_tokens(self) -> int:
        """Known tokens that are still to be prefilled, cached ones included."""
        computed = self.cache.table.computed
        running = sum(request.prefill_end - int(computed[request.row]) for request in self._prefilling)
        return running + self._waiting.num_tokens()

    def requeue(self, request: Request) -> None:
        """Queues a preempted request again, once all its tokens are known."""
        self._waiting.push(request)

    def _release_followers(self, request: Request) -> None:
        followers, request.followers = request.followers, []
        for follower in followers:
            if follower.phase is Phase.WAITING:
                self._waiting.push(follower)

    def _leave_row(self, request: Request) -> None:
        row = request.row
        if request.phase is Phase.PREFILL:
            self._prefilling.remove(request)
        elif request.phase is Phase.DECODE:
            self._decode_changed = True
        self.cache.close(request)
        self._seats.leave(row)

    # ---- one step -----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch:
        """Picks requests and pages for the next step.

        Args:
            now: Time of the engine's clock.

        Returns:
            The step; `num_tokens` is 0 when there is nothing to do.
        """
        self._expire_deadlines(now)
        self._extend_decoding()
        budget = self._max_step_tokens - len(self._decoding)
        chunks: list[Chunk] = []
        for request in list(self._prefilling):
            if budget > 0 and request.phase is Phase.PREFILL:
                budget -= self._plan_chunk(request, budget, chunks)
        while budget > 0 and (admitted := self._admit(now)) is not None:
            budget -= self._plan_chunk(admitted, budget, chunks)
        self._refresh_decoding()
        batch = Batch(
            decode_requests=self._decoding,
            decode_rows=self._decode_rows,
            chunks=chunks,
            sampled_requests=self._decoding,
            sampled_rows=self._decode_tuple,
            restores=self.cache.take_restores(),
            num_tokens=len(self._decoding) + sum(chunk.end - chunk.start for chunk in chunks),
        )
        last = [chunk for chunk in chunks if chunk.samples]
        if last:
            batch.sampled_requests = [*self._decoding, *(chunk.request for chunk in last)]
            batch.sampled_rows = (*self._decode_tuple, *(chunk.row for chunk in last))
        return batch

    def advance(self, batch: Batch) -> None:
        """Counts a step that has been launched: its rows are computed and its tokens are in flight."""
        table, counters = self.cache.table, self.counters
        counters.steps += 1
        counters.decode_tokens += len(batch.decode_requests)
        counters.prefill_tokens += batch.num_tokens - len(batch.decode_requests)
        self.cache.end_restores(batch.restores)
        rows = batch.decode_rows
        table.computed[rows] += 1
        table.generated[rows] += 1
        for row in rows[table.generated[rows] >= table.max_tokens[rows]].tolist():
            self._drain(row)
        for chunk in batch.chunks:
            request, row = chunk.request, chunk.row
            table.computed[row] = chunk.end
            if chunk.end < request.prefill_end:
                continue
            self._prefilling.remove(request)
            table.generated[row] += chunk.samples
            if table.generated[row] >= table.max_tokens[row]:
                request.phase = Phase.DRAINING
            else:
                request.phase = Phase.DECODE
                self._decoding = [*self._decoding, request]  # the batch under way keeps the list that it was given
                self._decode_changed = True
            self._release_followers(request)

    def remember(self, batch: Batch) -> list[tuple[int, int]]:
        """Stores the page boundaries that a step has reached, once its tokens before them have been read.

        Returns:
            Copies of state slots (source, target) to launch before the next step.
        """
        if self.cache.prefix is None:
            return []
        table, unit = self.cache.table, self.cache.page_tokens
        rows = batch.decode_rows
        reached = [batch.decode_requests[i] for i in np.flatnonzero(table.computed[rows] % unit == 0).tolist()]
        reached += [chunk.request for chunk in batch.chunks if chunk.end % unit == 0]
        copies: list[tuple[int, int]] = []
        for request in reached:
            if request.row < 0:
                continue
            copy = self.cache.remember(request, int(table.computed[request.row]))
            if copy is not None:
                copies.append(copy)
        return copies

    def _drain(self, row: int) -> None:
        request = self.cache.table.requests[row]
        assert request is not None
        request.phase = Phase.DRAINING
        self._decode_changed = True

    def _expire_deadlines(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].is_finished):
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished:
                self._expire(request)

    # ---- pages for decode ---------------------------------------------------------------------------------------

    def _extend_decoding(self) -> None:
        """Gets the next position's pages for every request that decodes; preempts from the end of the order if not."""
        self._refresh_decoding()
        while self._decoding and not self.cache.extend_decode(self._decode_rows):
            self._preempt(max((*self._decoding, *self._prefilling), key=_order))
            self._refresh_decoding()

    def _refresh_decoding(self) -> None:
        """Rebuilds the list of requests that decode if it has changed. Batches under way keep the old list."""
        if not self._decode_changed:
            return
        self._decoding = [request for request in self._decoding if request.phase is Phase.DECODE]
        self._decode_tuple = tuple(request.row for request in self._decoding)
        self._decode_rows = np.array(self._decode_tuple, dtype=np.int32)
        self._decode_changed = False

    def _preempt(self, request: Request) -> None:
        """Takes everything from a running request; it waits at its old place in the order."""
        request.num_pending = int(self.cache.table.generated[request.row]) - len(request.output_ids)
        self._leave_row(request)
        request.phase = Phase.WAITING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        if request.num_pending == 0:
            self._waiting.push(request)

    # ---- prefill ------------------------------------------------------------------------------------------------

    def _plan_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Adds the next chunk of a prefill, as far as budget and pages reach; returns its tokens."""
        cache, row = self.cache, request.row
        start = int(cache.table.computed[row])
        cache.expire(row, start)
        end = self._chunk_end(request, start, budget)
        reached = cache.reachable_end(row, end)
        while reached <= start:
            last = max((*self._decoding, *self._prefilling), key=_order)
            if last is request:
                return 0
            self._preempt(last)
            self._refresh_decoding()
            chunks[:] = [chunk for chunk in chunks if chunk.request is not last]
            reached = cache.reachable_end(row, end)
        cache.extend(row, reached)
        samples = reached == request.prefill_end and request.admitted.max_tokens > len(request.output_ids)
        chunks.append(Chunk(request=request, row=row, start=start, end=reached, samples=samples))
        return reached - start

    def _chunk_end(self, request: Request, start: int, budget: int) -> int:
        """Where a chunk may end: at a boundary that is to be stored, or on a page if the prompt goes on."""
        end = min(request.prefill_end, start + min(budget, self._max_chunk_tokens))
        stop = next((stop for stop in request.stops if stop > start), None)
        if stop is not None and stop <= end:
            return stop
        if self.cache.prefix is not None and end < request.prefill_end:
            aligned = end // self.cache.page_tokens * self.cache.page_tokens
            if aligned > start:
                return aligned
        return end

    def _admit(self, now: float) -> Request | None:
        """Gives the first waiting request a row if its whole prompt has room; nobody overtakes it."""
        cache, request = self.cache, self._waiting.peek()
        if request is None or cache.table.num_free == 0:
            return None
        promised = sum(
            -(-running.prefill_end // cache.page_tokens) - cache.table.token_end[running.row]
            for running in self._prefilling
        )
        running = len(self._decoding) + len(self._prefilling)
        spare = min(running, cache.token_pool.size // 32)
        if not cache.open(request, reserved_token_pages=promised + spare):
            return None
        self._waiting.pop()
        request.phase = Phase.PREFILL
        if not request.start_time:
            request.start_time = now
            request.num_cached_tokens = int(cache.table.computed[request.row])
        self._prefilling.append(request)
        self._prefilling.sort(key=_order)
        self._seats.take(request.row, request)
        return request


def _order(request: Request) -> tuple[int, int]:
    return request.order
