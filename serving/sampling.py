"""From the sampling fields of a body to the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halocline.engine.sampling_params import FieldError, SamplingParams
from halocline.serving.errors import bad_field, from_request_error

__all__ = ["sampling_params", "stop_texts"]

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)


def sampling_params(body: Mapping[str, Any], *, max_tokens: tuple[str, int | None], **more: Any) -> SamplingParams:
    """The parameters that a body states; what it leaves out keeps the engine's default.

    Args:
        body: Checked fields; null counts as left out.
        max_tokens: Name of the field in this protocol, and its value.
        **more: Parameters that protocols state in other words: n, logprobs, prompt_logprobs, stop.

    Raises:
        ApiError: A value is out of bounds; the field is named.
    """
    stated = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("top_k") is not None:
        stated["top_k"] = max(body["top_k"], 0)
    if body.get("logit_bias"):
        stated["logit_bias"] = _logit_bias(body["logit_bias"])
    if body.get("n") is not None:
        stated["n"] = body["n"]
    try:
        return SamplingParams(**{**stated, "max_tokens": max_tokens[1], **more})
    except FieldError as error:
        raise from_request_error(error, {"max_tokens": max_tokens[0]}) from error


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a body as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(stated: Mapping[str, float]) -> dict[int, float]:
    """Token ids arrive as texts, the keys of a JSON object."""
    bias = {}
    for key, value in stated.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_field("logit_bias", f"must have token ids as keys, not {key[:40]!r}")
        bias[int(key)] = value
    return bias
