"""Generation: one submitted prompt with its n outputs, and the streams by which callers follow it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from halocline.engine.admission import AdmittedRequest
from halocline.engine.engine_thread import EngineThread
from halocline.engine.outputs import OutputAssembler, request_output
from halocline.engine.prompt import ChatPrompt, Prompter
from halocline.engine.request import Request, RequestUpdate
from halocline.engine.results import OutputDelta, RequestOutput

__all__ = ["AsyncOutputStream", "Generation", "LoopMailbox", "OutputStream"]


class Generation:
    """The outputs of one prompt.

    Attributes:
        requests: What the engine works on, one for each output.
    """

    def __init__(
        self,
        admitted: AdmittedRequest,
        prompter: Prompter,
        *,
        chat: ChatPrompt | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> None:
        name = request_id or uuid.uuid4().hex
        self.requests = [
            Request(
                name,
                replace(admitted, params=admitted.params.for_choice(index)),
                index=index,
                priority=priority,
                arrival_time=time.monotonic(),
            )
            for index in range(admitted.params.n)
        ]
        self._assemblers = [OutputAssembler(request, prompter, chat) for request in self.requests]
        self._num_unfinished = len(self.requests)

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended, in the engine as well."""
        return self._num_unfinished == 0

    def take(self, request: Request, update: RequestUpdate) -> tuple[OutputDelta, bool]:
        """Takes an update.

        Returns:
            What it adds, and whether the engine should be told to stop: a stop string was found.
        """
        assembler = self._assemblers[request.index]
        was_open = assembler.finish_reason is None
        delta = assembler.update(update)
        if update.finish_reason is not None:
            self._num_unfinished -= 1
        return delta, was_open and assembler.stop_found is not None and update.finish_reason is None

    def result(self) -> RequestOutput:
        """The finished request."""
        assert self.is_finished, "outputs are still being generated"
        return request_output(self._assemblers)


class OutputStream:
    """Iterates over what a generation adds. Closing it, or leaving it early, ends the generation.

    Attributes:
        result: The finished request, once the iteration is over.
    """

    def __init__(self, generation: Generation, thread: EngineThread) -> None:
        self.result: RequestOutput | None = None
        self._generation = generation
        self._thread = thread
        self._updates = updates = queue.SimpleQueue[tuple[Request, RequestUpdate]]()
        for request in generation.requests:
            # Without a reference to the stream, so that one that nobody holds any more ends its generation.
            request.on_update = lambda request, update: updates.put((request, update))
        thread.submit(generation.requests)

    def __iter__(self) -> Iterator[OutputDelta]:
        return self

    def __next__(self) -> OutputDelta:
        """The next delta that says something.

        Raises:
            StopIteration: When every output has ended; `result` holds them.
        """
        while not self._generation.is_finished:
            request, update = self._updates.get()
            delta, stop = self._generation.take(request, update)
            if stop:
                self._thread.abort([request])
            if delta != OutputDelta(index=delta.index):
                return delta
        if self.result is None:
            self.result = self._generation.result()
        raise StopIteration

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_updates"):
            self.close()

    def close(self) -> None:
        """Ends what is still being generated."""
        if not self._generation.is_finished:
            self._thread.abort(self._generation.requests)


class LoopMailbox:
    """Brings updates from the engine's thread into an event loop, many with one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._updates: deque[tuple[AsyncOutputStream, Request, RequestUpdate]] = deque()
        self._awake = False

    def put(self, stream: AsyncOutputStream, request: Request, update: RequestUpdate) -> None:
        """Leaves an update; called on the engine's thread."""
        with self._lock:
            self._updates.append((stream, request, update))
            if self._awake:
                return
            self._awake = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed with work in flight: nobody waits any more
            stream.close()

    def _deliver(self) -> None:
        with self._lock:
            self._awake = False
            updates, self._updates = self._updates, deque()
        for stream, request, update in updates:
            stream.receive(request, update)


class AsyncOutputStream:
    """As `OutputStream`, for an event loop. Cancelling the task that iterates ends the generation.

    Attributes:
        result: The finished request, once the iteration is over.
    """

    def __init__(self, generation: Generation, thread: EngineThread, mailbox: LoopMailbox) -> None:
        self.result: RequestOutput | None = None
        self._generation = generation
        self._thread = thread
        self._deltas: asyncio.Queue[OutputDelta | None] = asyncio.Queue()
        for request in generation.requests:
            request.on_update = lambda request, update: mailbox.put(self, request, update)
        thread.submit(generation.requests)

    def receive(self, request: Request, update: RequestUpdate) -> None:
        """Takes an update; called on the event loop."""
        delta, stop = self._generation.take(request, update)
        if stop:
            self._thread.abort([request])
        if delta != OutputDelta(index=delta.index):
            self._deltas.put_nowait(delta)
        if self._generation.is_finished:
            self._deltas.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        """Yields the deltas that say something."""
        try:
            while self.result is None:
                delta = await self._deltas.get()
                if delta is None:
                    self.result = self._generation.result()
                else:
                    yield delta
        finally:
            self.close()

    def close(self) -> None:
        """Ends what is still being generated."""
        if not self._generation.is_finished:
            self._thread.abort(self._generation.requests)
