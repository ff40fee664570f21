"""The one thread that runs an engine, so that callers of any thread or event loop share it.

Everything that touches the engine happens on that thread: callers leave commands, results come by each request's
`on_update`. If a step raises, every request in flight ends with an error and later ones are refused.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from halocline.engine.request import Request, RequestUpdate
from halocline.hal.errors import HaloclineError, MachineError, lines

__all__ = ["EngineThread", "SteppedEngine"]

logger = logging.getLogger(__name__)


class SteppedEngine(Protocol):
    """What the thread asks of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add(self, request: Request, *, leader: Request | None = None) -> None:
        """Queues a request; with a leader, behind that request's prefill."""
        ...

    def abort(self, request: Request) -> None:
        """Ends a request and frees what it holds; one that has ended is left alone."""
        ...

    def step(self) -> None:
        """Runs one step and reports its tokens."""
        ...


class EngineThread:
    """Runs an engine until closed.

    Attributes:
        failure: What a step raised; the engine is dead then.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, Request] = {}
        self._forget_at = 64
        self._lock = threading.Lock()
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="halocline-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are worked on."""
        return self._thread.is_alive() and self.failure is None

    def submit(self, requests: Sequence[Request]) -> None:
        """Hands over the outputs of one prompt; the first one prefills it for the others.

        Raises:
            MachineError: If the engine is closed or dead.
        """
        with self._lock:
            if self.failure is not None:
                raise MachineError(
                    lines("the engine has failed", found=repr(self.failure), try_="start it again")
                ) from self.failure
            if self._closing:
                raise MachineError("the engine is closed")
            self._running.update((id(request), request) for request in requests)
            self._commands.put(lambda: self._add(requests))

    def abort(self, requests: Sequence[Request]) -> None:
        """Ends requests soon; those that have ended, or an engine that has, are left alone."""
        with self._lock:
            if self.failure is None and not self._closing:
                self._commands.put(lambda: self._abort(requests))

    def close(self) -> None:
        """Ends everything in flight and the thread. A second call does nothing."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._commands.put(lambda: self._abort(list(self._running.values())))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing and not self._engine.has_work and self._commands.empty()):
                self._take_commands()
                if self._engine.has_work:
                    self._engine.step()
                self._forget_finished()
        except HaloclineError as error:
            logger.error("the engine has failed: %s", error)
            self._fail(error)
        except BaseException as error:  # whatever it is, callers must not wait for ever
            logger.exception("the engine has failed")
            self._fail(error)

    def _take_commands(self) -> None:
        """Runs all commands that are there; waits for one if there is nothing else to do."""
        if not self._engine.has_work:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.add(request, leader=requests[0] if request is not requests[0] else None)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.is_finished:
                self._engine.abort(request)

    def _forget_finished(self) -> None:
        """Lets finished requests go, each time that their number may have doubled."""
        if len(self._running) < self._forget_at:
            return
        with self._lock:
            self._running = {key: request for key, request in self._running.items() if not request.is_finished}
        self._forget_at = 2 * len(self._running) + 64

    def _fail(self, error: BaseException) -> None:
        """Ends every request in flight, those still waiting to be added included."""
        with self._lock:
            self.failure = error
            running = list(self._running.values())
        for request in running:
            if request.finish_reason is None and request.on_update is not None:
                request.error = f"the engine has failed: {error!r}"
                request.finish_reason = "error"
                request.on_update(request, RequestUpdate((), (), "error"))
