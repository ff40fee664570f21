"""What every call passes: keys, cross-origin rules, a name for the log, counts.

Plain ASGI: a layer that copies bodies would cost each token of each stream.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
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
_KNOWN_LONG = 40


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

        refusal = self._refusal(scope, headers, allowed)
        try:
            if refusal is not None:
                await refusal(scope, receive, noting_send)
            else:
                await self._app(scope, receive, noting_send)
        finally:
            self._note(scope, status, time.monotonic() - begun)

    def _refusal(self, scope: Scope, headers: Headers, allowed: str | None) -> Response | None:
        """An answer to a call that goes no further."""
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            preflight = {"access-control-allow-headers": _CORS_HEADERS, "access-control-allow-methods": "GET, POST"}
            return Response(status_code=204 if allowed else 403, headers=preflight if allowed else {})
        if not self._keys or scope["path"] in _OPEN or self._has_key(headers):
            return None
        error = ApiError(
            401, "a valid API key is needed, as Authorization: Bearer KEY or x-api-key", code="invalid_api_key"
        )
        body = anthropic_body(error) if scope["path"].startswith("/v1/messages") else openai_body(error)
        return JSONResponse(body, 401, headers={"www-authenticate": "Bearer"})

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
            f", {user[:_KNOWN_LONG]!r}" if user else "",
        )
