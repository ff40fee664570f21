"""What every protocol's answer has in common: a job for the engine, and a writer that turns tokens into the answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halocline.engine.prompt import Prompter
from halocline.serving.engine_client import EngineRequest, TokenDelta
from halocline.serving.errors import ApiError

__all__ = ["Job", "ReplyWriter", "ServedModel", "TokenCounts", "caller", "new_id", "sse"]


class ReplyWriter(Protocol):
    """Makes a protocol's answer of tokens, as events or as one object.

    Attributes:
        stopped: Outputs (number of the prompt, number of the output) that have ended here, at a stop string, while
            the engine goes on; whoever tells the engine takes them out.
    """

    stopped: list[tuple[int, int]]

    def push(self, prompt: int, delta: TokenDelta) -> list[bytes]:
        """Takes news of an output of the job's request number `prompt`; returns events, none in a whole answer.

        Raises:
            ApiError: The output failed.
        """
        ...

    @property
    def is_over(self) -> bool:
        """Whether every output has ended."""
        ...

    def end(self) -> list[bytes]:
        """Events after the last output."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer as one object, once it is over."""
        ...

    def error(self, error: ApiError) -> bytes:
        """An event that tells of an error after the stream has begun."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One call of the API, ready for the engine.

    Attributes:
        id: Of the answer, and name of the request.
        requests: One for each prompt.
        writer: Of the answer.
        stream: Whether the answer comes as events.
        user: Who asked, for the log.
    """

    id: str
    requests: Sequence[EngineRequest]
    writer: ReplyWriter
    stream: bool
    user: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedModel:
    """The model as the API shows it.

    Attributes:
        name: Under which it is asked for.
        prompter: Makes its prompts.
        context: Tokens of prompt and output together.
        fingerprint: Of code, model and kernels.
        aliases: Further names.
        created: Time of the start, in seconds since 1970.
    """

    name: str
    prompter: Prompter
    context: int
    fingerprint: str = ""
    aliases: Sequence[str] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, name: str) -> None:
        """Refuses another model's name."""
        if name != self.name and name not in self.aliases:
            raise ApiError(
                404,
                f"model: {name[:200]!r} is not served here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )


@dataclass(kw_only=True)
class TokenCounts:
    """Tokens of an answer, added up over its outputs."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def openai(self) -> dict[str, Any]:
        """As chat and completions write them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


def caller(body: Mapping[str, Any]) -> str | None:
    """Who asks, for the log, from the fields by which OpenAI's protocols say so."""
    parts = [str(body[name]) for name in ("user", "safety_identifier") if body.get(name)]
    if body.get("metadata"):
        parts.append(json.dumps(body["metadata"], ensure_ascii=False))
    return " ".join(parts) or None


def new_id(prefix: str) -> str:
    """A fresh name such as `chatcmpl-1f0c...`."""
    return f"{prefix}{uuid.uuid4().hex}"


def sse(data: str | Mapping[str, Any], event: str | None = None) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {event}\n" if event is not None else ""
    return f"{head}data: {text}\n\n".encode()
