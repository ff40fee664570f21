"""Fields of POST /v1/messages and POST /v1/messages/count_tokens, the protocol of Anthropic's clients."""

from __future__ import annotations

from halocline.serving.fields_sampling import EXTENSIONS, MAX_STOPS, MAX_TOKENS, MODEL, OPENAI_SAMPLING, STREAM
from halocline.serving.schema import (
    Schema,
    any_of,
    array,
    boolean,
    choice,
    described,
    free_object,
    integer,
    number,
    object_,
    refused,
    string,
    tagged,
)

__all__ = ["COUNT_FIELDS", "MESSAGE_FIELDS"]

_NO_IMAGES = "this model reads text only; images and files are never fetched"
_NO_SERVER_TOOLS = "the server runs no tools of its own"
_CACHE = object_(
    {"type": choice("ephemeral"), "ttl": choice("5m", "1h")},
    "Honoured: every prefix is cached as long as it fits, so a mark changes nothing.",
    required=("type",),
)
_TEXT = object_(
    {"text": string(), "cache_control": _CACHE, "citations": refused("the model cites nothing", [])}, required=("text",)
)
_RESULT = tagged("type", {"text": _TEXT, "image": refused(_NO_IMAGES), "document": refused(_NO_IMAGES)})
_BLOCKS = array(
    tagged(
        "type",
        {
            "text": _TEXT,
            "thinking": object_({"thinking": string(), "signature": string()}, required=("thinking",)),
            "tool_use": object_(
                {
                    "id": string(least=1, most=256),
                    "name": string(least=1, most=256),
                    "input": free_object(),
                    "cache_control": _CACHE,
                    "caller": refused("programs that call tools are not supported", {"type": "direct"}),
                },
                required=("id", "name", "input"),
            ),
            "tool_result": object_(
                {
                    "tool_use_id": string(least=1, most=256),
                    "content": any_of(string(), array(_RESULT)),
                    "is_error": boolean(),
                    "cache_control": _CACHE,
                },
                required=("tool_use_id",),
            ),
            "image": refused(_NO_IMAGES),
            "document": refused(_NO_IMAGES),
            "search_result": refused(_NO_SERVER_TOOLS),
            "redacted_thinking": refused("reasoning is never redacted here"),
            "server_tool_use": refused(_NO_SERVER_TOOLS),
            "web_search_tool_result": refused(_NO_SERVER_TOOLS),
        },
    ),
    least=1,
)
_CONTENT = any_of(string(), _BLOCKS)
_TOOL = object_(
    {
        "type": choice("custom"),
        "name": string(pattern=r"^[a-zA-Z0-9_-]{1,64}$"),
        "description": string(),
        "input_schema": free_object(),
        "strict": boolean(),
        "cache_control": _CACHE,
        "eager_input_streaming": boolean(),
        "input_examples": refused("the model's prompt has no place for examples", []),
        "defer_loading": refused("tools are not searched", False),
        "allowed_callers": refused("programs that call tools are not supported", ["direct"]),
    },
    required=("name", "input_schema"),
)
_PARALLEL: dict[str, Schema] = {"disable_parallel_tool_use": boolean()}

_CONVERSATION: dict[str, Schema] = {
    "model": MODEL,
    "messages": array(
        tagged(
            "role",
            {
                "user": object_({"content": _CONTENT}, required=("content",)),
                "assistant": object_({"content": _CONTENT}, required=("content",)),
                "system": object_({"content": _CONTENT}, required=("content",)),
            },
        ),
        "The conversation. A last message of the assistant is continued. A tool_result with is_error=true begins "
        "with 'Error: ' in the prompt.",
        least=1,
    ),
    "system": any_of(string(), array(tagged("type", {"text": _TEXT})), about="Text before the conversation."),
    "tools": array(_TOOL, "Functions that the model may call. strict=true enforces the schema.", most=1024),
    "tool_choice": tagged(
        "type",
        {
            "auto": object_(_PARALLEL),
            "any": object_(_PARALLEL),
            "none": object_({}),
            "tool": object_({"name": string(least=1, most=64), **_PARALLEL}, required=("name",)),
        },
        "any and tool are enforced token by token, with thinking on and off.",
    ),
    "thinking": tagged(
        "type",
        {
            "enabled": object_({"budget_tokens": integer(1, MAX_TOKENS), "display": choice("summarized")}),
            "adaptive": object_({"display": choice("summarized")}),
            "disabled": object_({}),
        },
        "Default: disabled. budget_tokens bounds the reasoning: at the bound it is closed and the answer begins.",
    ),
    "output_config": object_(
        {
            "effort": choice("low", "medium", "high", "xhigh", "max"),
            "format": tagged("type", {"json_schema": object_({"schema": free_object()}, required=("schema",))}),
        },
        "Effort of the reasoning (as reasoning_effort of the chat endpoint) and form of the answer.",
    ),
    "cache_control": _CACHE,
    "speed": refused("there is one speed", "standard"),
    "user_profile_id": refused("there are no profiles"),
    "workspace_id": refused("there are no workspaces"),
    "mcp_servers": refused(_NO_SERVER_TOOLS, []),
    "context_management": refused("the conversation is never changed", {"edits": []}),
}

_PROPERTIES: dict[str, Schema] = {
    **_CONVERSATION,
    "max_tokens": integer(1, MAX_TOKENS, "Tokens to generate at most, reasoning included."),
    "stream": STREAM,
    "stop_sequences": array(
        string(least=1, most=1024),
        f"Up to {MAX_STOPS} texts that end the answer; not looked for in reasoning.",
        most=MAX_STOPS,
    ),
    "temperature": number(0, 2, "0 takes the most likely token; default 1."),
    "top_p": OPENAI_SAMPLING["top_p"],
    **EXTENSIONS,
    "top_k": integer(-1, 2**31 - 1, "Number of most likely tokens kept; 0 or -1 keeps all."),
    "seed": OPENAI_SAMPLING["seed"],
    "metadata": object_({"user_id": string(most=4096)}, "Honoured as the name in the request's log line."),
    "service_tier": choice("auto", "standard_only", about="Honoured: there is one tier, standard."),
    "container": refused(_NO_SERVER_TOOLS),
    "inference_geo": refused("the server is where it is"),
    "diagnostics": refused("there is none"),
    "compaction": refused("the conversation is never changed"),
    "fallbacks": refused("the server serves one model", []),
    "fallback_credit_token": refused("there are no credits"),
    "billing_policy": refused("there is no billing"),
    "thread": refused("answers are not stored"),
}

MESSAGE_FIELDS = described(
    object_(_PROPERTIES, required=("messages", "model", "max_tokens")), "A message of the assistant."
)
COUNT_FIELDS = described(object_(_CONVERSATION, required=("messages", "model")), "The size of a prompt.")
