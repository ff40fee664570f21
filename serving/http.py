"""The server's endpoints as an ASGI application."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from halocline.serving.admin import Admin
from halocline.serving.body import read_json
from halocline.serving.chat import chat_job
from halocline.serving.completions import completion_job
from halocline.serving.errors import ApiError
from halocline.serving.exchange import Exchange
from halocline.serving.gate import Gate
from halocline.serving.messages import count_tokens, message_job
from halocline.serving.page import page_routes
from halocline.serving.reply import Job
from halocline.serving.responses import response_job
from halocline.serving.state import ServerState

__all__ = ["make_app"]

JobMaker = Callable[[Mapping[str, Any], ServerState], Job]


def make_app(state: ServerState) -> ASGIApp:
    """The application of a server that has started."""
    routes = [
        Route("/v1/chat/completions", Generation("chat", _chat, state), methods=["POST"]),
        Route("/v1/completions", Generation("completions", _completion, state), methods=["POST"]),
        Route("/v1/responses", Generation("responses", _response, state), methods=["POST"]),
        Route("/v1/messages", Generation("messages", _message, state), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count, state), methods=["POST"]),
        *Admin(state).routes(),
        *page_routes(),
    ]
    return Gate(Router(routes, redirect_slashes=False), state)


class Generation:
    """An endpoint that asks the engine for tokens.

    An ASGI application by itself: what starlette wraps around functions would cost each token of a stream.
    """

    def __init__(self, name: str, make: JobMaker, state: ServerState) -> None:
        self._name = name
        self._make = make
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks a call beside the event loop and answers it."""
        state = self._state
        begun = time.monotonic()
        state.enter()
        try:
            body = json_object(await read_json(Request(scope, receive), state.config.max_body_bytes))
            job = await state.prepare(lambda: self._make(body, state))
        except BaseException:
            state.leave()
            raise
        scope["halocline.user"] = job.user
        exchange = Exchange(
            job,
            state.engine,
            on_begin=state.hold,
            on_first=lambda: state.metrics.first_token(self._name, time.monotonic() - begun),
            on_end=state.release,
        )
        await exchange(scope, receive, send)


def _chat(body: Mapping[str, Any], state: ServerState) -> Job:
    return chat_job(body, state.model, state.engine.info.limits, state.vocabulary)


def _completion(body: Mapping[str, Any], state: ServerState) -> Job:
    return completion_job(body, state.model, state.engine.info.limits)


def _response(body: Mapping[str, Any], state: ServerState) -> Job:
    return response_job(body, state.model, state.engine.info.limits, state.vocabulary)


def _message(body: Mapping[str, Any], state: ServerState) -> Job:
    return message_job(body, state.model, state.engine.info.limits, state.vocabulary)


async def _count(state: ServerState, request: Request) -> Response:
    """The size of a prompt."""
    state.check_ready()
    body = json_object(await read_json(request, state.config.max_body_bytes))
    return JSONResponse(await state.prepare(lambda: count_tokens(body, state.model)))


def json_object(body: Any) -> dict[str, Any]:
    """The body, which must be an object."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    return body
