"""Runs the server: starts the engine, listens, drains on the first signal and stops on the second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from halocline.hal.errors import InputError, lines
from halocline.serving.engine_client import EngineClient
from halocline.serving.http import make_app
from halocline.serving.state import ServerConfig, ServerState

__all__ = ["Bind", "run_server"]

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class Bind:
    """Where the server listens.

    Attributes:
        host: Name or address; this machine alone unless told otherwise.
        port: 0 takes a free one.
    """

    host: str = "127.0.0.1"
    port: int = 8000

    def open(self) -> socket.socket:
        """A listening socket; opened before the engine starts, so that a taken port is known at once.

        Raises:
            InputError: The address cannot be had.
        """
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self.host, self.port))
        except OSError as error:
            raise InputError(
                lines(
                    f"cannot listen on {self.host} port {self.port}",
                    found=error.strerror or error,
                    try_="another --port, or --port 0 for a free one",
                )
            ) from error
        return sock

    def url(self, sock: socket.socket) -> str:
        """The address as a person would open it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{sock.getsockname()[1]}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first.

    Attributes:
        ready_line: What the log says once connections are taken.
    """

    ready_line = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and says so."""
        await super().startup(sockets)
        logger.info("%s", self.ready_line)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def run_server(
    engine: EngineClient,
    config: ServerConfig,
    bind: Bind,
    *,
    ends_with: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Serves until a signal.

    Args:
        engine: Where requests go.
        config: What the operator decided.
        bind: Where to listen.
        ends_with: The server also ends when this returns; else it stays, ill, when its engine is lost.

    Returns:
        Exit status: 0 after a drain or a stop that was asked for, 1 if the engine was lost.

    Raises:
        HaloclineError: The server could not start.
    """
    sock = bind.open()
    with sock, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(engine, config, bind, sock, ends_with))


def _loop_factory() -> Any:
    import uvloop

    return uvloop.new_event_loop


async def _serve(
    engine: EngineClient,
    config: ServerConfig,
    bind: Bind,
    sock: socket.socket,
    ends_with: Callable[[], Coroutine[Any, Any, None]] | None,
) -> int:
    state = ServerState(engine, config)
    signals = _Signals()
    try:
        starting = asyncio.create_task(state.start())
        await signals.first_of(starting)
        if signals.count:
            starting.cancel()
            return 0
        starting.result()
        server = _make_server(state)
        server.ready_line = f"ready: {bind.url(sock)} serves {state.model.name}"
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await signals.first_of(serving, *([asyncio.create_task(ends_with())] if ends_with is not None else []))
        status = await _wind_down(state, signals)
        server.should_exit = True
        server.force_exit = signals.count > 1
        await serving
    finally:
        signals.close()
        await state.stop()
    return status


async def _wind_down(state: ServerState, signals: _Signals) -> int:
    """Lets what runs end, unless a second signal comes."""
    if state.num_active:
        logger.info("draining: %d requests are running; a second signal stops them", state.num_active)
    await signals.second_or(asyncio.create_task(state.drain()))
    if signals.count > 1:
        logger.info("stopping: %d requests are ended", state.num_active)
        state.engine.abort_all()
    return 0 if state.engine.health().ok else 1


def _make_server(state: ServerState) -> _Server:
    return _Server(
        uvicorn.Config(
            make_app(state),
            http="httptools",
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=5,
            ws="none",
        )
    )


class _Signals:
    """Counts SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.count = 0
        self._came = asyncio.Event()
        self._again = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._take)

    def _take(self) -> None:
        self.count += 1
        (self._came if self.count == 1 else self._again).set()

    async def first_of(self, *tasks: asyncio.Task[Any]) -> None:
        """Returns at the first signal, or when a task ends."""
        await self._either(self._came, *tasks)

    async def second_or(self, task: asyncio.Task[Any]) -> None:
        """Returns at the second signal, or when the task ends."""
        await self._either(self._again, task)

    async def _either(self, event: asyncio.Event, *tasks: asyncio.Task[Any]) -> None:
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def close(self) -> None:
        """Gives the signals back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
