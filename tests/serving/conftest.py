"""Servers for the tests: a live one with the scripted engine in its own process, and one without a socket."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # importlib mode leaves test folders out; the engine's process gets this path, too
    sys.path.insert(0, str(HERE))


class LiveServer:
    """A server process and what it printed."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, str(HERE / "scripted_server.py"), *arguments]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(r"ready: (http://\S+)", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> LiveServer:
        assert self._ready.wait(60), "the server did not start"
        assert self.url, "\n".join(self.lines)
        return self

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 20) -> int:
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)
            try:
                self.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.wait()


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """One live server for all tests that leave it as it was."""
    server = LiveServer().wait_ready()
    yield server
    server.close()


class InProcess:
    """A server without a socket and the event loop it lives on."""

    def __init__(self, runner: asyncio.Runner, server: Any) -> None:
        self.server = server
        self._runner = runner

    def run(self, coroutine: Any) -> Any:
        """Runs a coroutine on the server's loop; afterwards nothing is left of it."""
        result = self._runner.run(coroutine)
        self._runner.run(self.server.idle())
        return result

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        return self.run(self.server.post(path, body, headers))

    def get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        return self.run(self.server.get(path, headers))


@pytest.fixture(scope="session")
def inside() -> Iterator[InProcess]:
    """One server in this process for all tests that leave it as it was."""
    from in_process import InProcessServer

    with asyncio.Runner() as runner:
        server = runner.run(InProcessServer().__aenter__())
        yield InProcess(runner, server)
        runner.run(server.__aexit__())


@pytest.fixture
def start_server() -> Iterator[Callable[..., LiveServer]]:
    """Starts servers of a test's own and ends them after it."""
    started: list[LiveServer] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> LiveServer:
        started.append(LiveServer(*arguments, env=env))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def openai_client(live: LiveServer) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def anthropic_client(live: LiveServer) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=30)
