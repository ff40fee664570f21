"""Fields of POST /v1/completions."""

from __future__ import annotations

from halocline.engine.sampling_params import MAX_LOGPROBS
from halocline.serving.fields_sampling import (
    EXTENSIONS,
    MAX_TOKENS,
    MODEL,
    OPENAI_SAMPLING,
    RESPONSE_FORMATS,
    STREAM,
    STREAM_OPTIONS,
    USER_FIELDS,
)
from halocline.serving.schema import Schema, any_of, array, boolean, described, integer, object_, refused, string

__all__ = ["COMPLETION_FIELDS", "MAX_PROMPTS"]

MAX_PROMPTS = 256
_TOKEN = integer(0, 2**31 - 1)

_PROPERTIES: dict[str, Schema] = {
    "prompt": any_of(
        string(least=1),
        array(string(least=1), least=1, most=MAX_PROMPTS),
        array(_TOKEN, least=1),
        array(array(_TOKEN, least=1), least=1, most=MAX_PROMPTS),
        about=f"A text, a list of token ids, or up to {MAX_PROMPTS} of either. A text gets one BOS before it; token "
        "ids are taken as they are. Control tokens spelled in a text stay text.",
    ),
    "model": MODEL,
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "max_tokens": integer(
        0,
        MAX_TOKENS,
        "Tokens to generate at most; default 16, as in the protocol. 0 only reads the "
        "prompt, which is of use with echo and logprobs.",
    ),
    **OPENAI_SAMPLING,
    "echo": boolean("The answer begins with the prompt; with logprobs, so do they. Refused in streams."),
    "logprobs": integer(
        0, MAX_LOGPROBS, "Number of most likely tokens given with each token, besides the token itself."
    ),
    "return_token_ids": boolean(
        "Ours, by vLLM's name: choices carry `token_ids`, in streams those since the event before, text or not."
    ),
    "response_format": RESPONSE_FORMATS,
    **{name: USER_FIELDS[name] for name in ("user", "metadata", "safety_identifier", "prompt_cache_key")},
    **EXTENSIONS,
    "best_of": refused("use n and choose", 1),
    "suffix": refused("the model cannot fill a gap", ""),
    "store": refused("answers are not stored", False),
}

COMPLETION_FIELDS = described(object_(_PROPERTIES, required=("prompt", "model")), "A plain continuation of a text.")
