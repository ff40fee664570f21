"""The server without a socket and the scripted engine without a process: for thousands of calls in a test."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scripted_engine import FOLDER, ScriptedEngine

from halocline.engine.sampling_params import FieldError
from halocline.hal.errors import RequestError
from halocline.serving.engine_client import EngineHealth, EngineInfo, EngineRequest, TokenDelta, TokenStream
from halocline.serving.errors import ApiError, EngineDeadError, bad_field
from halocline.serving.grammar import GrammarCompiler
from halocline.serving.http import make_app
from halocline.serving.state import ServerConfig, ServerState


class InProcessEngine:
    """An `EngineClient` that steps a scripted engine on the event loop."""

    def __init__(self, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine(FOLDER)
        self._compiler = GrammarCompiler(self.engine.tokenizer.content, self.engine.limits)
        self._jobs: dict[int, tuple[str, TokenStream, tuple[Any, ...]]] = {}
        self._open: dict[int, int] = {}
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.dead = False

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def is_ready(self) -> bool:
        return not self.dead

    @property
    def num_requests(self) -> int:
        return len(self._jobs)

    def submit(self, request: EngineRequest) -> TokenStream:
        if self.dead:
            raise EngineDeadError
        number = next(self._numbers)
        stream = TokenStream(request.params.n, lambda output: self._abort(number, output))
        try:
            params = request.params
            if request.grammar is not None:
                params = replace(params, token_mask=self._compiler.compile(request.grammar))
            outputs = self.engine.make_outputs(request.id, request.prompt_ids, params)
        except RequestError as error:
            path = error.field if isinstance(error, FieldError) or request.grammar is None else request.grammar.path
            stream.fail(bad_field(path, str(error)))
            return stream
        self.engine.add(outputs)
        self._jobs[number] = (request.id, stream, outputs)
        self._open[number] = len(outputs)
        self._news.set()
        return stream

    def _abort(self, number: int, output: int | None) -> None:
        if number in self._jobs:
            for one in self._jobs[number][2]:
                if output in (None, one.index):
                    self.engine.abort(one)
            self._news.set()

    def abort(self, request_id: str) -> bool:
        found = [number for number, job in self._jobs.items() if job[0] == request_id]
        for number in found:
            self._abort(number, None)
            self._jobs[number][1].fail(ApiError(499, "the request was aborted", code="aborted"))
        return bool(found)

    def abort_all(self) -> int:
        return sum(self.abort(job[0]) for job in list(self._jobs.values()))

    def health(self) -> EngineHealth:
        return EngineHealth(ok=not self.dead, problem="it was killed" if self.dead else None)

    def stats(self) -> Mapping[str, Any]:
        return self.engine.report()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._note_death)

    def _note_death(self, task: asyncio.Task[None]) -> None:
        """A fault of the engine ends what waits for it, with the fault in sight."""
        if not task.cancelled():
            self.dead = True
            for _, stream, _ in self._jobs.values():
                stream.fail(EngineDeadError(f"the scripted engine raised {task.exception()!r}"))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        firsts: set[int] = set()
        while True:
            while not self.engine.has_work:
                self._news.clear()
                await self._news.wait()
            owners = {id(one): number for number, job in self._jobs.items() for one in job[2]}
            for one, update in self.engine.step():
                number = owners[id(one)]
                facts: dict[str, Any] = {}
                if id(one) not in firsts:
                    firsts.add(id(one))
                    facts["cached_tokens"] = one.num_cached_tokens
                    if one.prompt_logprobs:
                        facts["prompt_logprobs"] = tuple(one.prompt_logprobs)
                if update.finish_reason is not None:
                    firsts.discard(id(one))
                    if one.error:
                        facts["error"] = one.error
                stream = self._jobs[number][1]
                stream.put(TokenDelta(one.index, *update, facts))
                if update.finish_reason is not None:
                    self._open[number] -= 1
                    if self._open[number] == 0:
                        del self._jobs[number], self._open[number]
            await asyncio.sleep(0)


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[tuple[str | None, Any]]:
        """Name and data of each server-sent event."""
        found = []
        for block in self.body.decode().split("\n\n"):
            if not block:
                continue
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            data = fields["data"]
            found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
        return found


class InProcessServer:
    """A started server; call it from coroutines."""

    def __init__(self, config: ServerConfig | None = None, engine: InProcessEngine | None = None) -> None:
        self.engine = engine or InProcessEngine()
        self.state = ServerState(self.engine, config or ServerConfig(name="tiny"))

    async def __aenter__(self) -> InProcessServer:
        await self.state.start()
        self.app = make_app(self.state)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.state.stop()

    async def idle(self) -> None:
        """Lets the engine take its last steps, and checks that nothing is left."""
        for _ in range(100):
            if not self.engine.num_requests and not self.engine.engine.has_work:
                break
            await asyncio.sleep(0)
        assert self.engine.num_requests == 0
        assert self.engine.engine.report()["pages_used"] == 0
        assert self.state.num_active == 0

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Sends JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, data, {"content-type": "application/json", **(headers or {})})

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.call("GET", path, b"", headers or {})

    async def call(self, method: str, path: str, data: bytes, headers: Mapping[str, str]) -> Answer:
        answer = Answer()
        sent = asyncio.Event()
        messages = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {key.decode(): value.decode() for key, value in message["headers"]}
            else:
                answer.pieces.append(message.get("body", b""))
                if not message.get("more_body"):
                    sent.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(key.lower().encode(), value.encode()) for key, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        await self.app(scope, receive, send)
        return answer


def say(text: str = "", **fields: Any) -> str:
    """A prompt that makes the scripted engine say something."""
    return f"[[say {json.dumps({'text': text, **fields})}]]"
