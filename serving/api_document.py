"""Writes `docs/api.md` from the field tables: `python -m halocline.serving.api_document > docs/api.md`."""

from __future__ import annotations

import json
import sys
from typing import Any

from halocline.serving.endpoints import ENDPOINTS, Endpoint
from halocline.serving.schema import Schema

__all__ = ["api_document"]

_HEAD = """<!-- Written by `python -m halocline.serving.api_document` from the field tables in serving/. Edit those. -->

# API

Every field of every endpoint, honoured or refused. A field that is neither is unknown and gets a 400 with the nearest
known name; a refused field gets a 400 that names it, unless its value is one that asks for nothing. A field that is
null counts as left out. Fields marked "Ours" are extensions. How to set up a server and its clients stands in
[serving.md](serving.md).

Errors have OpenAI's form, `{"error": {"message", "type", "param", "code"}}`; below `/v1/messages`, Anthropic's,
`{"type": "error", "error": {"type", "message"}}`. `param` is the path of the field at fault.

| status | when |
| --- | --- |
| 400 | the body is not JSON, or a field is unknown, refused or wrong |
| 401 | the server has API keys and the call has none of them |
| 404 | unknown path, model or request |
| 408 | the body, or the reading of a stream, was too slow |
| 413, 415 | the body is too large, or not sent as application/json |
| 429 | the server works on as many calls as it takes; see Retry-After |
| 499 | the request was aborted through /abort |
| 500 | the generation failed, or the server made a mistake |
| 503 | the engine is gone or stuck, or the server drains before it stops |

In a stream that has begun, an error comes as an event of the protocol and the stream ends without its end mark.
"""


def api_document() -> str:
    """The document."""
    parts = [_HEAD]
    for endpoint in ENDPOINTS:
        parts.append(_section(endpoint))
    return "\n".join(parts)


def _section(endpoint: Endpoint) -> str:
    lines = [f"## `{endpoint.method} {endpoint.path}`", "", _about(endpoint), ""]
    if endpoint.fields is not None:
        required = endpoint.fields.get("required", ())
        lines += ["| field | | value | what it does |", "| --- | --- | --- | --- |"]
        lines += [_row(name, schema, name in required) for name, schema in endpoint.fields["properties"].items()]
        lines.append("")
    return "\n".join(lines)


def _about(endpoint: Endpoint) -> str:
    notes = [endpoint.about]
    if endpoint.streams:
        notes.append("With stream=true, server-sent events.")
    if not endpoint.needs_key:
        notes.append("Needs no API key.")
    return " ".join(notes)


def _row(name: str, schema: Schema, required: bool) -> str:
    if "x-refused" in schema:
        neutral = [f"`{json.dumps(value)}`" for value in schema["enum"] if value is not None]
        allowed = f"; lets {', '.join(neutral)} through" if neutral else ""
        return f"| `{name}` | refused | | {schema['x-refused']}{allowed} |"
    needed = "honoured, required" if required else "honoured"
    return f"| `{name}` | {needed} | {_value(schema)} | {_escaped(schema.get('description', ''))} |"


def _value(schema: Schema) -> str:
    """The kind of value, in few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_value(one) for one in schema["anyOf"]))
    if "oneOf" in schema:
        tag = schema["x-tag"]
        names = [
            one["properties"][tag]["enum"][0] + (" (refused)" if "x-refused" in one else "") for one in schema["oneOf"]
        ]
        return f"object, `{tag}` {', '.join(names)}"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    return _plain_value(schema)


def _plain_value(schema: Schema) -> str:
    kind = str(schema["type"])
    if kind in ("integer", "number"):
        return f"{kind}, {_bound(schema['minimum'])} to {_bound(schema['maximum'])}"
    if kind == "array":
        return f"list of {_value(schema['items'])}"
    if schema.get("properties"):
        return "object with " + ", ".join(f"`{name}`" for name in schema["properties"])
    return kind


def _bound(value: Any) -> str:
    for power in (31, 63):
        if value in (2**power - 1, -(2**power)):
            return f"2^{power} - 1" if value > 0 else f"-2^{power}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(api_document())
