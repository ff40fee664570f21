"""Fields of POST /v1/responses."""

from __future__ import annotations

from halocline.serving.fields_sampling import (
    EFFORT_FIELD,
    EXTENSIONS,
    MAX_TOKENS,
    MODEL,
    OPENAI_SAMPLING,
    STREAM,
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

__all__ = ["RESPONSE_FIELDS"]

_NO_IMAGES = "this model reads text only; images, sound and files are never fetched"
_NO_STORE = "answers are not stored"
_TEXT = object_(
    {"text": string(), "annotations": array(free_object()), "logprobs": array(free_object())}, required=("text",)
)
_PARTS = array(
    tagged(
        "type",
        {
            "input_text": object_({"text": string()}, required=("text",)),
            "output_text": _TEXT,
            "input_image": refused(_NO_IMAGES),
            "input_file": refused(_NO_IMAGES),
            "input_audio": refused(_NO_IMAGES),
            "refusal": refused("the model does not mark refusals"),
        },
    )
)
_STATUS = choice("in_progress", "completed", "incomplete")
_ITEM_HEAD: dict[str, Schema] = {"id": string(most=256), "status": _STATUS}

_ITEMS = tagged(
    "type",
    {
        "message": object_(
            {
                **_ITEM_HEAD,
                "role": choice("user", "assistant", "system", "developer"),
                "content": any_of(string(), _PARTS),
                "phase": choice("commentary", "final_answer"),
            },
            required=("role", "content"),
        ),
        "reasoning": object_(
            {
                **_ITEM_HEAD,
                "summary": array(free_object()),
                "content": array(tagged("type", {"reasoning_text": object_({"text": string()}, required=("text",))})),
                "encrypted_content": string(),
            }
        ),
        "function_call": object_(
            {
                **_ITEM_HEAD,
                "call_id": string(least=1, most=256),
                "name": string(least=1, most=256),
                "namespace": string(most=256),
                "arguments": string(),
                "caller": refused("programs that call tools are not supported", {"type": "direct"}),
            },
            required=("call_id", "name", "arguments"),
        ),
        "function_call_output": object_(
            {
                **_ITEM_HEAD,
                "call_id": string(least=1, most=256),
                "output": any_of(string(), _PARTS),
                "caller": refused("programs that call tools are not supported", {"type": "direct"}),
            },
            required=("call_id", "output"),
        ),
        "custom_tool_call": object_(
            {**_ITEM_HEAD, "call_id": string(least=1, most=256), "name": string(least=1, most=256), "input": string()},
            required=("call_id", "name", "input"),
        ),
        "custom_tool_call_output": object_(
            {**_ITEM_HEAD, "call_id": string(least=1, most=256), "output": any_of(string(), _PARTS)},
            required=("call_id", "output"),
        ),
        "item_reference": refused(_NO_STORE),
    },
)

_FUNCTION = object_(
    {
        "name": string(pattern=r"^[a-zA-Z0-9_-]{1,64}$"),
        "description": string(),
        "parameters": free_object(),
        "strict": boolean(),
        "defer_loading": refused("tools are not searched", False),
    },
    required=("name",),
)
_TOOLS = array(
    tagged(
        "type",
        {
            "function": _FUNCTION,
            "custom": object_(
                {"name": choice("apply_patch"), "description": string(), "format": free_object()}, required=("name",)
            ),
            "namespace": object_(
                {
                    "name": string(pattern=r"^[a-zA-Z0-9_-]{1,64}$"),
                    "description": string(),
                    "tools": array(tagged("type", {"function": _FUNCTION}), least=1, most=256),
                },
                required=("name", "tools"),
            ),
            **{
                name: refused("the server runs no tools of its own")
                for name in (
                    "web_search",
                    "web_search_preview",
                    "file_search",
                    "code_interpreter",
                    "computer_use_preview",
                    "image_generation",
                    "local_shell",
                    "shell",
                    "mcp",
                    "tool_search",
                    "apply_patch",
                )
            },
        },
    ),
    "Functions, namespaces of functions and the custom tool apply_patch.",
    most=1024,
)

_TOOL_CHOICE = any_of(
    choice("none", "auto", "required"),
    tagged(
        "type",
        {
            "function": object_({"name": string(least=1, most=256)}, required=("name",)),
            "custom": object_({"name": choice("apply_patch")}, required=("name",)),
            "allowed_tools": object_(
                {
                    "mode": choice("auto", "required"),
                    "tools": array(
                        tagged("type", {"function": object_({"name": string(least=1)}, required=("name",))}), least=1
                    ),
                },
                required=("mode", "tools"),
            ),
        },
    ),
    about="none, auto, required, one function, or the functions that are allowed; enforced token by token.",
)

_PROPERTIES: dict[str, Schema] = {
    "model": MODEL,
    "input": any_of(string(least=1), array(_ITEMS, least=1), about="A text, or items of a conversation."),
    "instructions": string("A system text before the conversation."),
    "stream": STREAM,
    "stream_options": object_(
        {"include_obfuscation": refused("events are not padded", False)}, "Token counts always come in the last event."
    ),
    "max_output_tokens": integer(
        1, MAX_TOKENS, "Tokens to generate at most, reasoning included. Default: up to the end of the context."
    ),
    "temperature": OPENAI_SAMPLING["temperature"],
    "top_p": OPENAI_SAMPLING["top_p"],
    "top_logprobs": integer(
        0, 20, "Number of most likely tokens given with each token; needs include to name message.output_text.logprobs."
    ),
    "include": array(
        choice("reasoning.encrypted_content", "message.output_text.logprobs"),
        "message.output_text.logprobs gives log-probabilities of the answer. reasoning.encrypted_content puts the "
        "reasoning into a field that clients return as it is; it is encoded, not encrypted.",
        most=16,
    ),
    "reasoning": object_(
        {
            "effort": EFFORT_FIELD,
            "summary": refused("reasoning is given in full, never summarised", "auto", "concise", "detailed"),
            "generate_summary": refused("reasoning is given in full, never summarised", "auto"),
            "context": refused("which reasoning is kept is part of the model's prompt format", "auto"),
            "mode": refused("there is one mode", "standard"),
        },
        "Effort of the reasoning; none turns it off.",
    ),
    "text": object_(
        {
            "format": tagged(
                "type",
                {
                    "text": object_({}),
                    "json_object": object_({}),
                    "json_schema": object_(
                        {
                            "name": string(least=1, most=64),
                            "description": string(most=65536),
                            "schema": free_object(),
                            "strict": boolean(),
                        },
                        required=("name", "schema"),
                    ),
                    "regex": object_({"regex": string(least=1, most=65536)}, required=("regex",)),
                },
            ),
            "verbosity": refused("the model was not trained for it", "medium"),
        },
        "Form of the answer, enforced token by token.",
    ),
    "tools": _TOOLS,
    "tool_choice": _TOOL_CHOICE,
    "parallel_tool_calls": boolean("false allows one call in an answer."),
    "truncation": refused("the input is never cut", "disabled"),
    **USER_FIELDS,
    "metadata": free_object("Given back in the response object.", values=string(most=4096), most=64),
    "seed": OPENAI_SAMPLING["seed"],
    **EXTENSIONS,
    "store": refused(_NO_STORE, False),
    "previous_response_id": refused(f"{_NO_STORE}; send the conversation in input"),
    "conversation": refused(f"{_NO_STORE}; send the conversation in input"),
    "background": refused(_NO_STORE, False),
    "background_options": refused(_NO_STORE),
    "prompt": refused("there are no stored prompts"),
    "max_tool_calls": refused("the server runs no tools of its own"),
    "context_management": refused("the input is never changed", []),
    "image": refused("the model writes text only"),
    "moderation": refused("the server moderates nothing"),
    "access_programs": refused("there are no access programs"),
    "prompt_cache_options": refused("the prefix cache has no options of a request"),
    "prompt_cache_retention": refused("the prefix cache keeps what fits", "in_memory"),
}

RESPONSE_FIELDS = described(object_(_PROPERTIES, required=("input", "model")), "A response to items of a conversation.")
