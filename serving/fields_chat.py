"""Fields of POST /v1/chat/completions."""

from __future__ import annotations

from halocline.serving.fields_sampling import (
    EFFORT_FIELD,
    EXTENSIONS,
    MAX_TOKENS,
    MODEL,
    OPENAI_SAMPLING,
    RESPONSE_FORMATS,
    STREAM,
    STREAM_OPTIONS,
    USER_FIELDS,
)
from halocline.serving.schema import (
    Schema,
    any_of,
    array,
    boolean,
    choice,
    described,
    free_object,
    integer,
    object_,
    refused,
    string,
    tagged,
)

__all__ = ["CHAT_FIELDS", "FUNCTION_TOOLS", "TOOL_CHOICE"]

_NO_IMAGES = "this model reads text only; images, sound and files are never fetched"
_TEXT_PARTS = array(
    tagged(
        "type",
        {
            "text": object_({"text": string()}, required=("text",)),
            "image_url": refused(_NO_IMAGES),
            "input_audio": refused(_NO_IMAGES),
            "file": refused(_NO_IMAGES),
            "refusal": refused("the model does not mark refusals"),
        },
    ),
    least=1,
)
_CONTENT = any_of(string(), _TEXT_PARTS)
_NAME = refused("the model's prompt has no place for names of participants")

_CALLS = array(
    tagged(
        "type",
        {
            "function": object_(
                {
                    "id": string(least=1, most=256),
                    "index": integer(0, 2**31 - 1),
                    "function": object_(
                        {"name": string(least=1, most=256), "arguments": string()}, required=("name", "arguments")
                    ),
                },
                required=("id", "function"),
            )
        },
    )
)

_MESSAGES = array(
    tagged(
        "role",
        {
            "system": object_({"content": _CONTENT, "name": _NAME}, required=("content",)),
            "developer": object_({"content": _CONTENT, "name": _NAME}, required=("content",)),
            "user": object_({"content": _CONTENT, "name": _NAME}, required=("content",)),
            "assistant": object_(
                {
                    "content": _CONTENT,
                    "reasoning_content": string(),
                    "tool_calls": _CALLS,
                    "prefix": boolean(),
                    "name": _NAME,
                    "refusal": refused("the model does not mark refusals"),
                    "annotations": refused("the model writes no annotations", []),
                    "audio": refused(_NO_IMAGES),
                    "function_call": refused("deprecated; use tool_calls"),
                }
            ),
            "tool": object_(
                {"content": _CONTENT, "tool_call_id": string(least=1, most=256), "name": string(most=256)},
                required=("content", "tool_call_id"),
            ),
            "function": refused("deprecated by the protocol; use the role tool"),
            "latest_reminder": object_({"content": _CONTENT}, required=("content",)),
        },
    ),
    "The conversation. Text is text: control tokens spelled in it stay text. developer counts as system; "
    "prefix=true on the last assistant message continues it; reasoning_content gives reasoning back.",
    least=1,
)

FUNCTION_TOOLS = array(
    tagged(
        "type",
        {
            "custom": refused("the model was trained for functions only"),
            "function": object_(
                {
                    "function": object_(
                        {
                            "name": string(pattern=r"^[a-zA-Z0-9_-]{1,64}$"),
                            "description": string(),
                            "parameters": free_object(),
                            "strict": boolean(),
                        },
                        required=("name",),
                    )
                },
                required=("function",),
            ),
        },
    ),
    "Functions that the model may call. strict=true enforces the parameters' schema token by token.",
    most=1024,
)

_NAMED = object_({"name": string(least=1, most=64)}, required=("name",))
TOOL_CHOICE = any_of(
    choice("none", "auto", "required"),
    tagged(
        "type",
        {
            "function": object_({"function": _NAMED}, required=("function",)),
            "allowed_tools": object_(
                {
                    "allowed_tools": object_(
                        {
                            "mode": choice("auto", "required"),
                            "tools": array(
                                tagged("type", {"function": object_({"function": _NAMED}, required=("function",))}),
                                least=1,
                            ),
                        },
                        required=("mode", "tools"),
                    )
                },
                required=("allowed_tools",),
            ),
        },
    ),
    about="none leaves the tools out of the prompt; required and a named function are enforced token by token, with "
    "thinking on and off; allowed_tools offers only these.",
)

_PROPERTIES: dict[str, Schema] = {
    "messages": _MESSAGES,
    "model": MODEL,
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "max_completion_tokens": integer(
        1, MAX_TOKENS, "Tokens to generate at most, reasoning included. Default: up to the end of the context."
    ),
    "max_tokens": integer(
        1, MAX_TOKENS, "Older name of max_completion_tokens; refused together with another value of it."
    ),
    **OPENAI_SAMPLING,
    "logprobs": boolean(
        "Log-probabilities of the answer's tokens in logprobs.content, and of the reasoning's in "
        "logprobs.reasoning_content; -9999 stands for minus infinity."
    ),
    "top_logprobs": integer(0, 20, "Number of most likely tokens given with each token; needs logprobs=true."),
    "response_format": RESPONSE_FORMATS,
    "tools": FUNCTION_TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": boolean("false allows one call in an answer."),
    "reasoning_effort": EFFORT_FIELD,
    "thinking": tagged(
        "type",
        {"enabled": object_({}), "disabled": object_({})},
        "DeepSeek's switch of thinking; reasoning arrives apart, in reasoning_content. Default: enabled.",
    ),
    "chat_template_kwargs": object_(
        {"thinking": boolean(), "enable_thinking": boolean()}, "Other servers' spelling of the switch of thinking."
    ),
    **USER_FIELDS,
    **EXTENSIONS,
    "store": refused("answers are not stored", False),
    "audio": refused("the model writes text only"),
    "modalities": refused("the model writes text only", ["text"]),
    "prediction": refused("predicted output is not used"),
    "web_search_options": refused("the server searches nothing"),
    "function_call": refused("deprecated by the protocol; use tool_choice", "auto", "none"),
    "functions": refused("deprecated by the protocol; use tools", []),
    "verbosity": refused("the model was not trained for it", "medium"),
    "moderation": refused("the server moderates nothing"),
    "prompt_cache_options": refused("the prefix cache has no options of a request"),
    "prompt_cache_retention": refused("the prefix cache keeps what fits", "in_memory"),
}

CHAT_FIELDS = described(object_(_PROPERTIES, required=("messages", "model")), "A chat turn.")
