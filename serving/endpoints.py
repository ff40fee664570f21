"""Every endpoint as data: what docs/api.md, the OpenAPI document and their tests are made of."""

from __future__ import annotations

from dataclasses import dataclass

from halocline.serving.fields_admin import ABORT_FIELDS, DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from halocline.serving.fields_chat import CHAT_FIELDS
from halocline.serving.fields_completions import COMPLETION_FIELDS
from halocline.serving.fields_messages import COUNT_FIELDS, MESSAGE_FIELDS
from halocline.serving.fields_responses import RESPONSE_FIELDS
from halocline.serving.schema import Schema

__all__ = ["ENDPOINTS", "Endpoint"]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One endpoint.

    Attributes:
        method: Of HTTP.
        path: With parameters in braces.
        about: One line.
        fields: Of the body; None for calls without one.
        streams: Whether stream=true gives events.
        needs_key: Whether it asks for an API key when there are any.
        media_type: Of a successful answer.
        statuses: Of answers that a good call may get.
    """

    method: str
    path: str
    about: str
    fields: Schema | None = None
    streams: bool = False
    needs_key: bool = True
    media_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        method="POST", path="/v1/chat/completions", about="OpenAI chat completions.", fields=CHAT_FIELDS, streams=True
    ),
    Endpoint(
        method="POST", path="/v1/completions", about="OpenAI completions.", fields=COMPLETION_FIELDS, streams=True
    ),
    Endpoint(method="POST", path="/v1/responses", about="OpenAI responses.", fields=RESPONSE_FIELDS, streams=True),
    Endpoint(method="POST", path="/v1/messages", about="Anthropic messages.", fields=MESSAGE_FIELDS, streams=True),
    Endpoint(method="POST", path="/v1/messages/count_tokens", about="Tokens of a prompt.", fields=COUNT_FIELDS),
    Endpoint(method="GET", path="/v1/models", about="The served model."),
    Endpoint(method="GET", path="/v1/models/{name}", about="One model.", statuses=(200, 404)),
    Endpoint(method="POST", path="/tokenize", about="Tokens of a text or a conversation.", fields=TOKENIZE_FIELDS),
    Endpoint(method="POST", path="/detokenize", about="Text of tokens.", fields=DETOKENIZE_FIELDS),
    Endpoint(method="POST", path="/abort", about="End a request, or all.", fields=ABORT_FIELDS, statuses=(200, 404)),
    Endpoint(method="GET", path="/health", about="Alive and stepping, or not.", needs_key=False, statuses=(200, 503)),
    Endpoint(method="GET", path="/ready", about="Takes work, or not.", needs_key=False, statuses=(200, 503)),
    Endpoint(method="GET", path="/metrics", about="Prometheus metrics.", media_type="text/plain"),
    Endpoint(method="GET", path="/server_info", about="Kernel table, settings with their sources, memory plan."),
    Endpoint(method="GET", path="/stats", about="What happens now and did in the last minutes."),
    Endpoint(method="GET", path="/openapi.json", about="This document."),
)
