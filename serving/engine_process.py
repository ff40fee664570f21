"""The engine in a process of its own, as the HTTP side sees it.

The HTTP process starts the engine's process, hands requests over a socket pair and gets one message a step back. If
the engine's process dies, its end of the line closes and everything that waits gets an error at once; if it hangs,
its heartbeats stop and health turns red.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, cast

from halocline.hal.errors import MachineError, lines
from halocline.serving.engine_client import EngineHealth, EngineInfo, EngineRequest, TokenDelta, TokenStream
from halocline.serving.errors import ApiError, EngineDeadError, bad_field
from halocline.serving.wire import Frames, pack

__all__ = ["EngineLaunch", "ProcessEngine"]

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLaunch:
    """How the engine's process is made.

    Attributes:
        factory: `module:function` that builds the engine there.
        arguments: Its keyword arguments; plain data.
        verbosity: As of `halocline.hal.logs.configure`.
        search_path: Folders added to the module search path.
        stall_seconds: Without a sign of life for so long, the engine counts as stuck.
    """

    factory: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    verbosity: int = 0
    search_path: tuple[str, ...] = ()
    stall_seconds: float = 60.0


class _Job:
    """A request in flight."""

    __slots__ = ("id", "stream")

    def __init__(self, request_id: str, stream: TokenStream) -> None:
        self.id = request_id
        self.stream = stream


class ProcessEngine:
    """An `EngineClient` whose engine is another process."""

    def __init__(self, launch: EngineLaunch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._line: _Line | None = None
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count(1)
        self._info: EngineInfo | None = None
        self._stats: dict[str, Any] = {}
        self._problem: str | None = "the engine has not started"
        self._last_sign = time.monotonic()
        self._stopping = False
        self._ready: asyncio.Future[None] | None = None
        self._gone = asyncio.Event()

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the process and waits until the engine is ready.

        Raises:
            MachineError: The engine could not start; what it said is in the message.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-m", "halocline.serving.engine_worker", str(theirs.fileno())]
            self._process = await asyncio.to_thread(subprocess.Popen, command, pass_fds=(theirs.fileno(),))
        finally:
            theirs.close()
        ours.setblocking(False)
        self._ready = loop.create_future()
        _, self._line = await loop.create_connection(lambda: _Line(self), sock=ours)
        self._line.send(("start", dataclasses.asdict(self._launch)))
        await self._ready

    async def stop(self) -> None:
        """Ends the process: asks first, then kills."""
        self._stopping = True
        self._problem = "the engine was stopped"
        if self._process is None:
            return
        if self._info is None:  # it loads and listens to nothing
            self._process.kill()
        elif self._line is not None and not self._line.closed:
            self._line.send(("stop",))
        try:
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def wait_until_gone(self) -> None:
        """Returns when the process has ended, whoever ended it."""
        await self._gone.wait()

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.pid

    # ---- requests -----------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        if self._info is None:
            raise EngineDeadError("the engine is not ready")
        return self._info

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._info is not None and self._problem is None

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._jobs)

    def submit(self, request: EngineRequest) -> TokenStream:
        """Hands a request over."""
        if self._line is None or not self.is_ready:
            raise EngineDeadError(self._problem or "the engine is not ready")
        number = next(self._numbers)
        stream = TokenStream(request.params.n, lambda index: self._abort(number, index))
        self._jobs[number] = _Job(request.id, stream)
        self._line.send(("submit", number, request.id, request.packed_ids, request.params, request.grammar))
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request by name."""
        found = [number for number, job in self._jobs.items() if job.id == request_id]
        for number in found:
            self._end_by_operator(number)
        return bool(found)

    def abort_all(self) -> int:
        """Ends every request."""
        numbers = list(self._jobs)
        for number in numbers:
            self._end_by_operator(number)
        return len(numbers)

    def _end_by_operator(self, number: int) -> None:
        job = self._jobs[number]
        self._abort(number, None)
        job.stream.fail(ApiError(499, "the request was aborted", code="aborted"))

    def _abort(self, number: int, index: int | None) -> None:
        if index is None:
            self._jobs.pop(number, None)
        if self._line is not None and not self._line.closed:
            self._line.send(("abort", number, index))

    # ---- reports ------------------------------------------------------------------------------------------------

    def health(self) -> EngineHealth:
        """Alive and stepping, or why not."""
        silence = time.monotonic() - self._last_sign
        if self._problem is None and silence > self._launch.stall_seconds:
            return EngineHealth(ok=False, problem=f"no sign of life from the engine for {silence:.0f} s")
        return EngineHealth(ok=self._problem is None, problem=self._problem)

    def stats(self) -> Mapping[str, Any]:
        """The engine's last counts."""
        return self._stats

    # ---- from the line ------------------------------------------------------------------------------------------

    def receive(self, message: tuple[Any, ...]) -> None:
        """Takes a message of the engine."""
        self._last_sign = time.monotonic()
        kind = message[0]
        if kind == "step":
            self._take_step(message[1])
        elif kind == "beat":
            self._stats, problem = message[1], message[2]
            if not self._stopping:
                self._problem = problem
        elif kind == "refused":
            self._refuse(*message[1:])
        elif kind == "lost":
            self._lose(message[1])
        elif kind == "ready":
            self._take_ready(message[1])
        elif kind == "failed":
            self._problem = message[1]
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(MachineError(message[1]))

    def _take_step(self, rows: list[tuple[Any, ...]]) -> None:
        jobs = self._jobs
        for number, *fields in rows:
            job = jobs.get(number)
            if job is None:
                continue
            job.stream.put(TokenDelta(*fields))
            if job.stream.is_finished:
                jobs.pop(number, None)

    def _refuse(self, number: int, field: str | None, message: str) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            job.stream.fail(bad_field("", message) if field is None else bad_field(field, message))

    def _lose(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            job.stream.fail(ApiError(500, "the request failed; the server's log says why", code="generation_failed"))

    def _take_ready(self, info: EngineInfo) -> None:
        self._info = info
        self._problem = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def lost(self) -> None:
        """The line has closed: the process is gone."""
        how = self._exit_words()
        self._gone.set()
        if not self._stopping:
            self._problem = f"the engine process is gone ({how})"
            logger.error("the engine process is gone (%s); %d requests were lost", how, len(self._jobs))
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                MachineError(lines("the engine did not start", found=how, try_="read the lines above"))
            )
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.stream.fail(EngineDeadError())

    def _exit_words(self) -> str:
        code = None
        if self._process is not None:
            try:
                code = self._process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                return "it closed the line"
        if code is None:
            return "it never ran"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class _Line(asyncio.Protocol):
    """Our end of the socket pair."""

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine = engine
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The line is open."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of messages came."""
        for message in self._frames.feed(data):
            self._engine.receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end has closed."""
        self.closed = True
        self._engine.lost()

    def send(self, message: object) -> None:
        """Sends a message; the transport keeps what the line cannot take yet."""
        assert self._transport is not None
        self._transport.write(pack(message))
