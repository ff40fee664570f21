"""What a caller of the API did wrong or what the server cannot do now, and how each protocol writes that down.

A message names the field and never a path of this machine, a stack trace or a secret.
"""

from __future__ import annotations

import json
from typing import Any

from halocline.engine.sampling_params import FieldError
from halocline.hal.errors import RequestError

__all__ = [
    "ApiError",
    "EngineDeadError",
    "anthropic_body",
    "bad_field",
    "compact",
    "from_request_error",
    "openai_body",
]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_aborted",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than success.

    Attributes:
        status: Of HTTP.
        message: One line for the caller.
        param: Field that is at fault, as a path such as `messages[0].content`.
        code: Short name of the fault, for programs.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """Name of the class of faults, shared by both protocols."""
        return _KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")


class EngineDeadError(ApiError):
    """The engine process is gone or stuck; what waits cannot be answered."""

    def __init__(self, message: str = "the engine stopped; the request was lost") -> None:
        super().__init__(503, message, code="engine_dead")


def bad_field(path: str, rule: str, *, code: str = "invalid_value") -> ApiError:
    """A 400 that names a field."""
    return ApiError(400, f"{path}: {rule}" if path else rule, param=path or None, code=code)


def from_request_error(error: RequestError, names: dict[str, str] | None = None) -> ApiError:
    """The engine's refusal of a request as an answer.

    Args:
        error: What the engine says.
        names: Names of the protocol's fields by the engine's, where they differ.
    """
    summary, *facts = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, FieldError):
        name = (names or {}).get(error.field, error.field)
        return ApiError(400, summary.replace(error.field, name, 1) + _facts(facts), param=name, code="invalid_value")
    code = "context_length_exceeded" if "context" in summary else "invalid_value"
    return ApiError(400, summary + _facts(facts), param=(names or {}).get("prompt"), code=code)


def _facts(facts: list[str]) -> str:
    """What was asked, found and can be done, on the same line."""
    kept = [" ".join(fact.split()) for fact in facts]
    return f" ({'; '.join(kept)})" if kept else ""


def openai_body(error: ApiError) -> dict[str, Any]:
    """The error as OpenAI's endpoints write it."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error as Anthropic's endpoints write it."""
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}


def compact(value: object) -> str:
    """JSON without spaces, other scripts than Latin kept readable."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
