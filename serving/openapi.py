"""The OpenAPI document, made of the field tables."""

from __future__ import annotations

import re
from typing import Any

from halocline import __version__
from halocline.serving.endpoints import ENDPOINTS, Endpoint

__all__ = ["openapi_document"]

_ERRORS = {
    400: "A field is at fault.",
    401: "A key is needed.",
    413: "Too large.",
    415: "Not JSON.",
    429: "Too many calls.",
    503: "Not available.",
}


def openapi_document(*, secured: bool = False) -> dict[str, Any]:
    """The document.

    Args:
        secured: Whether this server asks for an API key.
    """
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, secured)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Halocline", "version": __version__},
        "paths": paths,
    }
    if secured:
        document["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    return document


def _operation(endpoint: Endpoint, secured: bool) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", endpoint.path)
    operation: dict[str, Any] = {
        "summary": endpoint.about,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ],
        "responses": {str(status): _response(endpoint, status) for status in endpoint.statuses},
    }
    if secured and endpoint.needs_key:
        operation["security"] = [{"key": []}]
    if endpoint.fields is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": nullable(endpoint.fields)}},
        }
        for status, text in _ERRORS.items():
            operation["responses"].setdefault(str(status), _error(text))
    elif secured and endpoint.needs_key:
        operation["responses"]["401"] = _error(_ERRORS[401])
    return operation


def _response(endpoint: Endpoint, status: int) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media_type if status == 200 else "application/json": {}}
    if endpoint.streams and status == 200:
        content["text/event-stream"] = {}
    return {"description": endpoint.about, "content": content}


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as bodies may be: a field that is not required may be null."""
    made = {key: value for key, value in schema.items() if key not in ("properties", "items", "anyOf", "oneOf")}
    if "properties" in schema:
        required = schema.get("required", ())
        made["properties"] = {
            name: one
            if name in required and "properties" not in one and "items" not in one
            else nullable(one)
            if name in required
            else {"anyOf": [nullable(one), {"type": "null"}]}
            for name, one in schema["properties"].items()
        }
    if "items" in schema:
        made["items"] = nullable(schema["items"])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            made[word] = [nullable(one) for one in schema[word]]
    return made
