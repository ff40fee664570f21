"""The server's endpoints as an ASGI application."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from halocline.serving.admin import Admin
from halocline.serving.body import read_json
from halocline.serving.chat import chat_job
from halocline.serving.completions import completion_job
from halocline.serving.errors import ApiError, anthropic_body, openai_body
from halocline.serving.exchange import Exchange
from halocline.serving.gate import Gate
from halocline.serving.messages import count_tokens, message_job
from halocline.serving.page import page_routes
from halocline.serving.reply import Job
from halocline.serving.responses import response_job
from halocline.serving.state import ServerState

__all__ = ["make_app"]

_ANTHROPIC = "/v1/messages"


def make_app(state: ServerState) -> ASGIApp:
    """The application of a server that has started."""
    generation = _Generation(state)
    admin = Admin(state)
    routes = [
        Route("/v1/chat/completions", generation.chat, methods=["POST"]),
        Route("/v1/completions", generation.completions, methods=["POST"]),
        Route("/v1/responses", generation.responses, methods=["POST"]),
        Route("/v1/messages", generation.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", generation.count, methods=["POST"]),
        *admin.routes(),
        *page_routes(),
    ]
    handlers: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _api_error,
        HTTPException: _http_error,
        Exception: _unexpected,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Gate(app, state)


class _Generation:
    """Endpoints that ask the engine for tokens."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def chat(self, request: Request) -> Any:
        """A chat turn."""
        return await self._run(
            request, "chat", lambda body, state: chat_job(body, state.model, state.engine.info.limits, state.vocabulary)
        )

    async def completions(self, request: Request) -> Any:
        """A plain continuation."""
        return await self._run(
            request, "completions", lambda body, state: completion_job(body, state.model, state.engine.info.limits)
        )

    async def responses(self, request: Request) -> Any:
        """A response to items."""
        return await self._run(
            request,
            "responses",
            lambda body, state: response_job(body, state.model, state.engine.info.limits, state.vocabulary),
        )

    async def messages(self, request: Request) -> Any:
        """A message of the assistant."""
        return await self._run(
            request,
            "messages",
            lambda body, state: message_job(body, state.model, state.engine.info.limits, state.vocabulary),
        )

    async def count(self, request: Request) -> Response:
        """The size of a prompt."""
        state = self._state
        state.check_ready()
        body = _object(await read_json(request, state.config.max_body_bytes))
        return JSONResponse(await state.prepare(lambda: count_tokens(body, state.model)))

    async def _run(self, request: Request, endpoint: str, make: Callable[[Any, ServerState], Job]) -> Exchange:
        """Checks a call beside the event loop and answers it."""
        state = self._state
        begun = time.monotonic()
        state.enter()
        try:
            body = _object(await read_json(request, state.config.max_body_bytes))
            job = await state.prepare(partial(make, body, state))
        except BaseException:
            state.leave()
            raise
        request.scope["halocline.user"] = job.user
        return Exchange(
            job,
            state.engine,
            on_begin=state.hold,
            on_first=lambda: state.metrics.first_token(endpoint, time.monotonic() - begun),
            on_end=state.release,
        )


def _object(body: Any) -> Any:
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    return body


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    words = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not for this path"}
    headers = dict(error.headers or {})
    return _answer(
        request, ApiError(error.status_code, words.get(error.status_code, "the request is refused"), headers=headers)
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours: the log has the details, the answer has none."""
    del error  # starlette raises it again, and uvicorn's logger tells of it
    return _answer(request, ApiError(500, "the server made a mistake; its log says which", code="internal_error"))


def _answer(request: Request, error: ApiError) -> Response:
    body = anthropic_body(error) if request.url.path.startswith(_ANTHROPIC) else openai_body(error)
    return JSONResponse(body, error.status, headers=error.headers)
