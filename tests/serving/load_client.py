"""Many streams over raw sockets, and what they cost the server.

As a script: `load_client.py PORT PID [STREAMS TOKENS]`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from in_process import say


@dataclass(frozen=True)
class Load:
    """What a round measured; seconds but for `cpu_us_per_token`."""

    tokens: int
    wall: float
    cpu_us_per_token: float
    first_median: float
    first_p99: float


class _Stream(asyncio.Protocol):
    """Sends one request and counts the events that come back."""

    def __init__(self, request: bytes, leave_after: int | None = None) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0.0
        self.events = 0
        self._request = request
        self._leave_after = leave_after

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._begun = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.first:
            assert data.startswith(b"HTTP/1.1 200"), data[:300]
            self.first = time.perf_counter() - self._begun
        self.events += data.count(b"data: ")
        if self._leave_after is not None and self.events >= self._leave_after:
            self._transport.abort()
        elif b"data: [DONE]" in data:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request(tokens: int, *, stream: bool = True) -> bytes:
    """A chat request as bytes; a stream's script lasts for as long as it is read."""
    body = json.dumps(
        {
            "model": "tiny",
            "stream": stream,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": say("word and more ", repeat=2000 if stream else 1)}],
            "thinking": {"type": "disabled"},
        }
    )
    return raw_request("/v1/chat/completions", body)


def raw_request(path: str, body: str) -> bytes:
    """A POST of JSON as the bytes of HTTP."""
    data = body.encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _open(port: int, stream: _Stream) -> _Stream:
    await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", port)
    await stream.done
    return stream


async def measure(port: int, pid: int, *, streams: int = 256, tokens: int = 200) -> Load:
    """Runs so many streams at once."""
    asked = request(tokens)
    before, begun = cpu_seconds(pid), time.perf_counter()
    done = await asyncio.gather(*[_open(port, _Stream(asked)) for _ in range(streams)])
    wall, cpu = time.perf_counter() - begun, cpu_seconds(pid) - before
    count = sum(one.events for one in done) - 3 * streams  # role, finish reason and [DONE] are no tokens
    assert count == streams * tokens
    first = sorted(one.first for one in done)
    return Load(count, wall, cpu / count * 1e6, first[streams // 2], first[int(streams * 0.99)])


async def vanish(port: int, *, clients: int = 1000) -> None:
    """Clients that go away after three events, without a word."""
    asked = request(7000)
    await asyncio.gather(*[_open(port, _Stream(asked, leave_after=3)) for _ in range(clients)])


async def short_requests(port: int, count: int) -> None:
    """So many short requests over 16 connections."""
    asked = request(2, stream=False)
    room = iter(range(count))

    async def one_connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in room:
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*[one_connection() for _ in range(16)])


def run(coroutine: Any) -> Any:
    """On uvloop, so that the client is not what is measured."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


if __name__ == "__main__":
    port, pid, *sizes = map(int, sys.argv[1:])
    print(run(measure(port, pid, **dict(zip(("streams", "tokens"), sizes, strict=False)))))
