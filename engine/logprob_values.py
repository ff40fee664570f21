"""Log-probabilities as plain values, and how JSON carries those that it cannot. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["JSON_FLOOR", "TokenLogprob", "json_logprob"]

JSON_FLOOR = -9999.0
"""What stands for minus infinity where only JSON numbers are allowed."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How likely a token was, and which ones were most likely.

    Attributes:
        token_id: The token.
        logprob: Its natural log-probability; may be -inf.
        top: Most likely tokens and their log-probabilities, best first, lower ids first among equals.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def json_logprob(logprob: float) -> float:
    """A number that JSON can carry: `JSON_FLOOR` for what is below it or not a number."""
    return logprob if logprob > JSON_FLOOR else JSON_FLOOR
