"""Fields that several endpoints share: how tokens are chosen, when an answer ends, and who asks."""

from __future__ import annotations

from halocline.engine.prompt import EFFORTS
from halocline.engine.sampling_params import MAX_CHOICES, SEED_MAX, SEED_MIN
from halocline.serving.schema import (
    Schema,
    any_of,
    array,
    boolean,
    choice,
    free_object,
    integer,
    number,
    object_,
    refused,
    string,
    tagged,
)

__all__ = [
    "EFFORT_FIELD",
    "EXTENSIONS",
    "MAX_STOPS",
    "MAX_TOKENS",
    "MODEL",
    "OPENAI_SAMPLING",
    "RESPONSE_FORMATS",
    "STREAM",
    "STREAM_OPTIONS",
    "USER_FIELDS",
]

MAX_STOPS = 16
MAX_TOKENS = 2**31 - 1
_TOKEN_ID_MAX = 2**31 - 1

MODEL = string("Name of the served model, as /v1/models lists it.", least=1, most=1024)
STREAM = boolean("Server-sent events while the answer grows; without it, one JSON object at the end.")
STREAM_OPTIONS = object_(
    {
        "include_usage": boolean("A last event with an empty list of choices carries the token counts."),
        "include_obfuscation": refused("events are not padded", False),
    },
    "Honoured in streams; refused without stream=true.",
)

OPENAI_SAMPLING: dict[str, Schema] = {
    "temperature": number(0, 2, "0 takes the most likely token; default 1. Honoured while thinking, too."),
    "top_p": number(0, 1, "Smallest set of most likely tokens with at least this probability; default 1."),
    "presence_penalty": number(-2, 2, "Subtracted from the logit of each token that the output contains."),
    "frequency_penalty": number(-2, 2, "Subtracted once for each time that the output contains the token."),
    "logit_bias": free_object(
        "Added to the logits of these token ids, -100 to 100.", values=number(-100, 100), most=1024
    ),
    "seed": integer(SEED_MIN, SEED_MAX, "Names the draws: the same request with the same seed gives the same tokens."),
    "n": integer(1, MAX_CHOICES, "Number of answers, each from draws of its own."),
    "stop": any_of(
        string(least=1, most=1024),
        array(string(least=1, most=1024), most=MAX_STOPS),
        about=f"Up to {MAX_STOPS} texts that end the answer; they are cut off. "
        "Not looked for in reasoning or tool calls.",
    ),
}

EXTENSIONS: dict[str, Schema] = {
    "top_k": integer(-1, 2**31 - 1, "Ours: number of most likely tokens kept; 0 or -1 keeps all."),
    "min_p": number(0, 1, "Ours: tokens kept have at least this share of the largest probability; below 1."),
    "repetition_penalty": number(
        0, 100, "Ours: divides positive and multiplies negative logits of tokens seen; above 0."
    ),
    "min_tokens": integer(
        0,
        MAX_TOKENS,
        "Ours: the end token and stop token ids have no effect before this many tokens. "
        "Refused together with stop strings.",
    ),
    "ignore_eos": boolean("Ours: the model's end token does not end the answer."),
    "stop_token_ids": array(
        integer(0, _TOKEN_ID_MAX), "Ours: token ids that end the answer, besides the model's end token.", most=1024
    ),
}

USER_FIELDS: dict[str, Schema] = {
    "user": string("Honoured as the name in the request's log line; it has no other use here.", most=4096),
    "metadata": free_object(
        "Honoured as part of the request's log line; there is no store of answers to search.",
        values=string(most=4096),
        most=64,
    ),
    "safety_identifier": string("Honoured as the name in the request's log line.", most=4096),
    "prompt_cache_key": string(
        "Honoured: every prompt is looked up in the one prefix cache, so a key changes nothing.", most=4096
    ),
    "service_tier": choice("auto", "default", about="Honoured: there is one tier, default. Other tiers are refused."),
}

EFFORT_FIELD = choice(
    *EFFORTS,
    about="none turns thinking off; minimal and low think without an instruction; medium, high and xhigh ask for "
    "thorough thinking; ultra and max for the most. Default: the server's --effort.",
)

RESPONSE_FORMATS = tagged(
    "type",
    {
        "text": object_({}),
        "json_object": object_({}),
        "json_schema": object_(
            {
                "json_schema": object_(
                    {
                        "name": string(least=1, most=64),
                        "description": string(most=65536),
                        "schema": free_object(),
                        "strict": boolean(),
                    },
                    required=("name", "schema"),
                )
            },
            required=("json_schema",),
        ),
        "regex": object_({"regex": string(least=1, most=65536)}, required=("regex",)),
        "choice": object_({"choices": array(string(least=1, most=4096), least=1, most=4096)}, required=("choices",)),
    },
    "Form of the answer, enforced token by token after the reasoning: any JSON object, a JSON schema, and two of "
    "our own, a regular expression and one of several texts.",
)
