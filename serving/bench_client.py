"""A load generator for OpenAI's completions: closed loop (so many at once) or open loop (so many a second).

Prompts are token ids, drawn by a seed from the ids of a plain text, so that their length is exact; outputs ignore the
end token, so theirs is, too. One connection a request, no client library in the way.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from halocline.hal.errors import InputError, MachineError, lines

__all__ = ["Level", "Record", "Workload", "run_level"]

_TEXT = "The tide turns twice a day, and where two waters meet one can see the line between them from a boat. " * 8


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of a server.

    Attributes:
        url: Of the server, without /v1.
        model: Name of the model.
        input_tokens: Of each prompt.
        output_tokens: Of each answer.
        requests: Number of requests of a level.
        seed: Of prompts and arrival times.
        api_key: If the server asks for one.
        timeout_s: After which a request counts as failed.
    """

    url: str
    model: str
    input_tokens: int = 512
    output_tokens: int = 128
    requests: int = 64
    seed: int = 0
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Level:
    """How hard the server is asked: one of both is set.

    Attributes:
        concurrency: Requests at once; the next one starts when one ends.
        rate: Requests a second, arriving at random (Poisson), whatever the server does.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency is not None else f"rate {self.rate:g}/s"


@dataclass(kw_only=True)
class Record:
    """One request; times are seconds of the monotonic clock.

    Attributes:
        start: When it was sent.
        times: When each event with new tokens came.
        end: When the answer ended.
        input_tokens, output_tokens: As the server counts them.
        error: What went wrong, if something did.
    """

    start: float = 0.0
    times: Sequence[float] = ()
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


async def run_level(
    workload: Workload, level: Level, advance: Callable[[int], None] = lambda done: None
) -> list[Record]:
    """Sends the requests of a level.

    Args:
        workload: What is asked.
        level: How hard.
        advance: Told of the number of requests that have ended.

    Raises:
        InputError: The URL is none.
        MachineError: The server does not answer.
    """
    target = _Target(workload)
    ids = await target.plain_ids()
    rng = random.Random(f"{workload.seed} {level}")
    prompts = [[rng.choice(ids) for _ in range(workload.input_tokens)] for _ in range(workload.requests)]
    done = 0

    async def one(prompt: list[int]) -> Record:
        nonlocal done
        record = await target.complete(prompt)
        done += 1
        advance(done)
        return record

    if level.rate is not None:
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(one(prompt)))
            await asyncio.sleep(rng.expovariate(level.rate))
        return list(await asyncio.gather(*tasks))
    assert level.concurrency is not None
    waiting = iter(prompts)

    async def worker() -> list[Record]:
        return [await one(prompt) for prompt in waiting]

    rows = await asyncio.gather(*[worker() for _ in range(level.concurrency)])
    return [record for row in rows for record in row]


class _Target:
    """The server's address and how a request is written."""

    def __init__(self, workload: Workload) -> None:
        parts = urlsplit(workload.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(lines(f"{workload.url} is no address of a server", try_="--url http://127.0.0.1:8000"))
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        self._workload = workload

    async def plain_ids(self) -> list[int]:
        """Token ids of a plain text."""
        try:
            status, body = await self._whole("/tokenize", {"prompt": _TEXT, "add_special_tokens": False})
        except OSError as error:
            raise MachineError(
                lines(f"no answer from {self._workload.url}", found=error, try_="halocline serve, or another --url")
            ) from error
        if status != 200:
            raise MachineError(lines("the server cannot tokenize", found=f"status {status}", try_="a Halocline server"))
        ids: list[int] = json.loads(body)["tokens"]
        return ids

    async def complete(self, prompt: list[int]) -> Record:
        """Sends a request and notes when what came."""
        record = Record(start=time.perf_counter())
        body = {
            "model": self._workload.model,
            "prompt": prompt,
            "max_tokens": self._workload.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # a token need not bring text at once; other servers may know the text alone
        }
        try:
            async with asyncio.timeout(self._workload.timeout_s):
                await self._stream("/v1/completions", body, record)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end = time.perf_counter()
        return record

    async def _stream(self, path: str, body: dict[str, Any], record: Record) -> None:
        reader, writer = await self._send(path, body)
        times: list[float] = []
        try:
            status, _ = await _read_head(reader)
            if status != 200:
                record.error = f"status {status}: {(await reader.read(2000)).decode('utf-8', 'replace')}"
                return
            async for line in reader:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    record.error = event["error"]["message"]
                    return
                if event.get("usage"):
                    record.input_tokens = event["usage"]["prompt_tokens"]
                    record.output_tokens = event["usage"]["completion_tokens"]
                elif event["choices"] and (event["choices"][0].get("token_ids") or event["choices"][0]["text"]):
                    times.append(time.perf_counter())
            if not times:
                record.error = (
                    f"{self._workload.output_tokens} tokens were asked for, no text and no token ids came; "
                    "choose a model that answers in text, or a server with return_token_ids"
                )
        finally:
            record.times = times
            writer.close()

    async def _whole(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        reader, writer = await self._send(path, body)
        try:
            status, length = await _read_head(reader)
            return status, await reader.readexactly(length)
        finally:
            writer.close()

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=1 << 22)
        data = json.dumps(body).encode()
        head = [
            f"POST {self._base}{path} HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "content-type: application/json",
            "connection: close",
            f"content-length: {len(data)}",
        ]
        if self._workload.api_key is not None:
            head.append(f"authorization: Bearer {self._workload.api_key}")
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        return reader, writer


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Status and content length of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *fields = head.split("\r\n")
    named = dict(field.lower().split(": ", 1) for field in fields if ": " in field)
    return int(first.split()[1]), int(named.get("content-length", 0))
