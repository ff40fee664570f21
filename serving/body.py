"""Reads the body of a call: bounded in size, time and depth, and strict about what JSON is."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from halocline.serving.errors import ApiError

__all__ = ["parse_json", "read_json"]

_READ_SECONDS = 60.0
_SMALL = 32 * 1024
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, limit: int) -> Any:
    """The body as a JSON value.

    Large bodies are parsed beside the event loop.

    Args:
        request: With a body that was not read.
        limit: Bytes of the largest body.

    Raises:
        ApiError: The body is too large, too slow, of another type or not JSON.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"the body must be sent as content-type application/json, not {kind[:80] or 'without a type'}"
        )
    stated = request.headers.get("content-length")
    if stated is not None and stated.isdigit() and int(stated) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(_READ_SECONDS):
            data = await _read(request.stream(), limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_READ_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the client left", code="client_gone") from None
    return parse_json(data) if len(data) <= _SMALL else await asyncio.to_thread(parse_json, data)


async def _read(stream: AsyncIterator[bytes], limit: int) -> bytes:
    pieces, size = [], 0
    async for piece in stream:
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)


def parse_json(data: bytes) -> Any:
    """A JSON value of bytes.

    Raises:
        ApiError: They are none: not UTF-8, not JSON, nested too deeply, or with text that is not Unicode.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise _malformed("a text holds half of a surrogate pair") from None
    except ValueError as error:
        raise _malformed(str(error).splitlines()[0][:200]) from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the {limit} bytes that this server takes", code="body_too_large")
