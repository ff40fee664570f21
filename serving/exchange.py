"""One exchange with a caller: hands a job to the engine and writes the answer as it comes.

The answer's status is sent with the first token, so that what fails before has a status of its own. A caller who
leaves, or does not read, ends the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from halocline.serving.engine_client import EngineClient, TokenDelta, TokenStream
from halocline.serving.errors import ApiError
from halocline.serving.reply import Job

__all__ = ["Exchange"]


_GONE = "client_gone"


class Exchange:
    """The answer to one call, as an ASGI application.

    Attributes:
        sending_since: Time at which the present piece was handed to the connection, while it is not taken.
    """

    def __init__(
        self,
        job: Job,
        engine: EngineClient,
        *,
        on_begin: Callable[[Exchange], None],
        on_first: Callable[[], None],
        on_end: Callable[[Exchange], None],
    ) -> None:
        """Prepares; the callbacks tell of the beginning, the first token and the end."""
        self._job = job
        self._engine = engine
        self._streams: list[TokenStream] = []
        self._on_begin, self._on_first, self._on_end = on_begin, on_first, on_end
        self.sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the exchange to its end."""
        del scope
        self._on_begin(self)
        watch: asyncio.Task[None] | None = None
        try:
            for request in self._job.requests:
                self._streams.append(self._engine.submit(request))
            watch = asyncio.create_task(self._watch(receive))
            await (self._send_events(send) if self._job.stream else self._send_whole(send))
        except ApiError as error:
            if error.code != _GONE:
                raise
        finally:
            if watch is not None:
                watch.cancel()
            for stream in self._streams:
                stream.close()
            self._on_end(self)

    async def _watch(self, receive: Receive) -> None:
        """Ends the work when the caller leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        for stream in self._streams:
            stream.close()
            stream.fail(ApiError(499, "the client left", code=_GONE))

    async def _send_whole(self, send: Send) -> None:
        writer = self._job.writer
        async with aclosing(self._news()) as news:
            async for prompt, deltas in news:
                for delta in deltas:
                    writer.push(prompt, delta)
                self._stop_ended()
        response = JSONResponse(writer.whole(), headers={"x-request-id": self._job.id})
        await response({"type": "http"}, _never, send)

    async def _send_events(self, send: Send) -> None:
        writer, begun = self._job.writer, False
        try:
            async with aclosing(self._news()) as news:
                async for prompt, deltas in news:
                    events = [event for delta in deltas for event in writer.push(prompt, delta)]
                    self._stop_ended()
                    if not events:
                        continue
                    if not begun:
                        begun = True
                        await send(_head(self._job.id))
                    await self._send_piece(send, b"".join(events))
        except ApiError as error:
            if not begun or error.code == _GONE:
                raise
            await self._send_piece(send, writer.error(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if not begun:
            await send(_head(self._job.id))
        await send({"type": "http.response.body", "body": b"".join(writer.end()), "more_body": False})

    async def _send_piece(self, send: Send, piece: bytes) -> None:
        self.sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self.sending_since = None

    async def _news(self) -> AsyncGenerator[tuple[int, list[TokenDelta]], None]:
        """What the engine says, until every output has ended, with the number of the prompt."""
        writer = self._job.writer
        if len(self._streams) == 1:
            stream = self._streams[0]
            deltas = await stream.read()
            self._on_first()
            yield 0, deltas
            while not writer.is_over:
                yield 0, await stream.read()
            return
        first = True
        async with aclosing(_merged(self._streams)) as merged:
            async for prompt, deltas in merged:
                if first:
                    first = False
                    self._on_first()
                yield prompt, deltas
                if writer.is_over:
                    return

    def _stop_ended(self) -> None:
        """Tells the engine of outputs that ended here."""
        stopped = self._job.writer.stopped
        while stopped:
            prompt, output = stopped.pop()
            self._streams[prompt].stop(output)


async def _merged(streams: list[TokenStream]) -> AsyncGenerator[tuple[int, list[TokenDelta]], None]:
    """News of several streams in the order in which they come."""
    reads: dict[asyncio.Task[list[TokenDelta]], int] = {
        asyncio.create_task(stream.read()): index for index, stream in enumerate(streams)
    }
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=reads.__getitem__):
                index = reads.pop(task)
                deltas = task.result()
                if not streams[index].is_drained:
                    reads[asyncio.create_task(streams[index].read())] = index
                yield index, deltas
    finally:
        for task in reads:
            task.cancel()


def _head(request_id: str) -> dict[str, Any]:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"x-request-id", request_id.encode()),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _never() -> Any:
    raise AssertionError("a whole answer reads nothing")
