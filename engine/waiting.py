"""WaitingQueue: who is admitted next. First come, first served; priority moves a request forward by a bounded time.

The place in the queue is fixed at arrival: the step of arrival minus `priority * priority_steps`, then the order of
arrival. A request is overtaken only by requests that arrive within `priority_steps` steps for each unit of priority
that they have more, so nobody starves. A preempted request keeps its place.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from halocline.engine.request import Phase

if TYPE_CHECKING:
    from halocline.engine.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Requests without a row, smallest `order` first. Finished ones are dropped when they come up."""

    def __init__(self, priority_steps: int) -> None:
        self._priority_steps = priority_steps
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._arrivals = 0

    def arrive(self, request: Request, step: int) -> None:
        """Gives a request its place; `push` queues it."""
        request.order = (step - request.priority * self._priority_steps, self._arrivals)
        self._arrivals += 1

    def push(self, request: Request) -> None:
        """Queues a request at its place. Each order occurs once, so requests are never compared."""
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The request to admit next."""
        while self._heap and self._heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def num_tokens(self) -> int:
        """Known tokens of all requests in it."""
        return sum(request.num_tokens for _, request in self._heap if request.phase is Phase.WAITING)

    def pop(self) -> Request:
        """Removes and returns what `peek` showed."""
        return heapq.heappop(self._heap)[1]
