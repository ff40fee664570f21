"""Endpoints for operators and tools: health, metrics, facts, models, tokens, abort."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from halocline.hal.errors import RequestError
from halocline.serving.body import read_json
from halocline.serving.chat import chat_turn
from halocline.serving.errors import ApiError, bad_field, from_request_error
from halocline.serving.fields_admin import ABORT_FIELDS, DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from halocline.serving.openapi import openapi_document
from halocline.serving.schema import check
from halocline.serving.state import ServerState

__all__ = ["Admin"]


class Admin:
    """The endpoints; each answers from what is known, none waits for the engine."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """Of the application."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/server_info", self.server_info),
            Route("/stats", self.stats),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/abort", self.abort, methods=["POST"]),
        ]

    async def health(self, _request: Request) -> Response:
        """Green while the engine is alive and stepping."""
        health = self._state.engine.health()
        if health.ok:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "ill", "problem": health.problem}, 503)

    async def ready(self, _request: Request) -> Response:
        """Green while new work is taken."""
        state = self._state
        if state.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not (state.engine.is_ready and state.engine.health().ok):
            return JSONResponse({"status": "not ready"}, 503)
        return JSONResponse({"status": "ready"})

    async def metrics(self, _request: Request) -> Response:
        """Counts for Prometheus."""
        return Response(self._state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def server_info(self, _request: Request) -> Response:
        """Which kernels run, which settings hold and where from, how memory is divided."""
        state = self._state
        return JSONResponse(
            {
                "model": state.model.name,
                "context": state.model.context,
                "fingerprint": state.model.fingerprint,
                "effort": state.model.prompter.effort,
                "settings": list(state.config.settings),
                **state.engine.info.facts,
            }
        )

    async def stats(self, _request: Request) -> Response:
        """What happens now and did in the last minutes."""
        state = self._state
        health = state.engine.health()
        return JSONResponse(
            {
                "time": time.time(),
                "started": state.started,
                "health": {"ok": health.ok, "problem": health.problem},
                "draining": state.draining,
                "calls": state.num_active,
                "engine": dict(state.engine.stats()),
                "history": state.history.rows(),
            }
        )

    async def openapi(self, _request: Request) -> Response:
        """The OpenAPI document."""
        return JSONResponse(openapi_document(secured=bool(self._state.config.api_keys)))

    async def models(self, _request: Request) -> Response:
        """The one model, as both protocols list it."""
        listed = [self._shown(name) for name in (self._state.model.name, *self._state.model.aliases)]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": listed, **ends})

    async def model(self, request: Request) -> Response:
        """One model."""
        name = request.path_params["name"]
        self._state.model.check_name(name)
        return JSONResponse(self._shown(name))

    def _shown(self, name: str) -> dict[str, Any]:
        model = self._state.model
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "halocline",
            "max_model_len": model.context,
            "type": "model",
            "display_name": name,
            "created_at": when,
        }

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text or of a conversation."""
        body = await self._body(request, TOKENIZE_FIELDS)
        ids = await self._state.prepare(lambda: self._ids(body))
        answer: dict[str, Any] = {"tokens": list(ids), "count": len(ids), "max_model_len": self._state.model.context}
        if body.get("return_token_strs"):
            tokenizer = self._state.model.prompter.tokenizer
            answer["token_strs"] = [tokenizer.token_bytes(one).decode("utf-8", "replace") for one in ids]
        return JSONResponse(answer)

    def _ids(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        model = self._state.model
        text, messages = body.get("prompt"), body.get("messages")
        if (text is None) == (messages is None):
            raise bad_field("prompt", "either prompt or messages is needed")
        if messages is not None:
            return chat_turn(body, model).prompt.token_ids
        assert text is not None
        try:
            ids = tuple(model.prompter.tokenizer.encode(text))
        except RequestError as error:
            raise from_request_error(error, {"prompt": "prompt"}) from error
        return ids if body.get("add_special_tokens") is False else (model.prompter.bos_id, *ids)

    async def detokenize(self, request: Request) -> Response:
        """Text of tokens."""
        body = await self._body(request, DETOKENIZE_FIELDS)
        size = self._state.engine.info.limits.vocab_size
        tokens: list[int] = body["tokens"]
        if tokens and max(tokens) >= size:
            raise bad_field("tokens", f"holds {max(tokens)}; the vocabulary has ids 0 to {size - 1}")
        tokenizer = self._state.model.prompter.tokenizer
        text = await self._state.prepare(
            lambda: b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
        )
        return JSONResponse({"prompt": text})

    async def abort(self, request: Request) -> Response:
        """Ends requests."""
        body = await self._body(request, ABORT_FIELDS)
        name = body.get("request_id")
        if bool(name) == bool(body.get("all")):
            raise bad_field("request_id", "either request_id or all=true is needed")
        if name is None:
            return JSONResponse({"aborted": self._state.engine.abort_all()})
        if not self._state.engine.abort(name):
            raise ApiError(404, "there is no request of that name", param="request_id", code="request_not_found")
        return JSONResponse({"aborted": 1})

    async def _body(self, request: Request, fields: dict[str, Any]) -> Any:
        body = await read_json(request, self._state.config.max_body_bytes)
        await self._state.prepare(lambda: check(fields, body))
        if body.get("model") is not None:
            self._state.model.check_name(body["model"])
        return body
