"""Fields of the endpoints for operators and tools: tokenize, detokenize, abort."""

from __future__ import annotations

from halocline.serving.fields_chat import CHAT_FIELDS
from halocline.serving.fields_sampling import MODEL
from halocline.serving.schema import array, boolean, described, integer, object_, string

__all__ = ["ABORT_FIELDS", "DETOKENIZE_FIELDS", "TOKENIZE_FIELDS"]

_CHAT = CHAT_FIELDS["properties"]
_SAME = ("messages", "tools", "tool_choice", "reasoning_effort", "thinking", "chat_template_kwargs", "response_format")

TOKENIZE_FIELDS = described(
    object_(
        {
            "model": MODEL,
            "prompt": string("A text, taken as it is: nothing is added, control tokens stay text."),
            "add_special_tokens": boolean(
                "Whether a BOS comes before the text; default true, as /v1/completions does."
            ),
            "return_token_strs": boolean("Also give the text of each token."),
            **{name: _CHAT[name] for name in _SAME},
        }
    ),
    "The tokens of a text (prompt) or of a rendered conversation (messages and the fields that shape its prompt).",
)
DETOKENIZE_FIELDS = described(
    object_({"model": MODEL, "tokens": array(integer(0, 2**31 - 1), "Token ids.", most=2**21)}, required=("tokens",)),
    "The text of tokens, control tokens included.",
)
ABORT_FIELDS = described(
    object_(
        {
            "request_id": string(
                "Name of the request: the id of its answer, also in the header x-request-id.", least=1
            ),
            "all": boolean("true ends every request."),
        }
    ),
    "Ends a request; whoever waits for it gets an error.",
)
