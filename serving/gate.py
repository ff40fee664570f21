"""What every call passes: keys, cross-origin rules, a name for the log, counts.

Plain ASGI: a layer that copies bodies would cost each token of each stream.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from halocline.serving.errors import ApiError, anthropic_body, openai_body
from halocline.serving.reply import new_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from halocline.serving.state import ServerState

__all__ = ["Gate"]

logger = logging.getLogger(__name__)

_OPEN = frozenset({"/health", "/ready", "/", "/page.js", "/page.css"})
_CORS_HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"
_SHOWN_CALLER = 200


class Gate:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [key.encode() for key in state.config.api_keys]
        self._origins = frozenset(state.config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a call in, or answers it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # starlette's routes raise, rather than answer in plain text, when there is an application
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin if origin in self._origins else None
        begun = time.monotonic()
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(message, allowed)
            await send(message)

        try:
            refusal = self._refusal(scope, headers, allowed)
            if refusal is not None:
                await refusal(scope, receive, noting_send)
            else:
                await self._app(scope, receive, noting_send)
        except Exception as error:
            if status:  # the answer has begun: only the connection can tell that it ended badly
                raise
            await _error_answer(scope["path"], _as_api_error(error, scope))(scope, receive, noting_send)
        finally:
            self._note(scope, status, time.monotonic() - begun)

    def _refusal(self, scope: Scope, headers: Headers, allowed: str | None) -> Response | None:
        """An answer to a call that goes no further.

        Raises:
            ApiError: It has no key.
        """
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            preflight = {"access-control-allow-headers": _CORS_HEADERS, "access-control-allow-methods": "GET, POST"}
            return Response(status_code=204 if allowed else 403, headers=preflight if allowed else {})
        if not self._keys or scope["path"] in _OPEN or self._has_key(headers):
            return None
        raise ApiError(
            401,
            "a valid API key is needed, as Authorization: Bearer KEY or x-api-key",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _has_key(self, headers: Headers) -> bool:
        """Compares with every key, in a time that tells nothing."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        shown = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return any([hmac.compare_digest(shown.encode(), key) for key in self._keys])

    def _add_headers(self, message: Message, allowed: str | None) -> None:
        headers = MutableHeaders(scope=message)
        if "x-request-id" not in headers:
            headers["x-request-id"] = new_id("req_")
        headers["request-id"] = headers["x-request-id"]
        if allowed is not None:
            headers["access-control-allow-origin"] = allowed
            headers.add_vary_header("origin")

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if "endpoint" in scope else "other"
        self._state.metrics.answered(path, status or 499, seconds)
        user = scope.get("halocline.user")
        logger.debug(
            "%s %s: %d in %.3f s%s",
            scope["method"],
            scope["path"][:200],
            status or 499,
            seconds,
            f", {user[:_SHOWN_CALLER]!r}" if user else "",
        )


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    """What the caller is told; of a fault of ours, nothing but that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        words = {404: f"there is no {scope['path'][:200]} here", 405: f"{scope['method']} is not for this path"}
        said = words.get(error.status_code, "the request is refused")
        return ApiError(error.status_code, said, headers=dict(error.headers or {}))
    logger.error("a call of %s failed", scope["path"][:200], exc_info=error)
    return ApiError(500, "the server made a mistake; its log says which", code="internal_error")


def _error_answer(path: str, error: ApiError) -> Response:
    body = anthropic_body(error) if path.startswith("/v1/messages") else openai_body(error)
    return JSONResponse(body, error.status, headers=error.headers)
