"""What restricts an output, as plain data that travels to the engine's process, where it becomes a token mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GrammarSpec"]


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """A restriction of the output.

    Attributes:
        kind: Language of `text`: a JSON schema, a regular expression, a grammar in llguidance's dialect of Lark, or
            `any` for no restriction besides the bound of the reasoning.
        text: The restriction.
        path: Field of the request that it came from, for messages.
        starts_in_reasoning: Whether the output begins with reasoning, which is free until its end token.
        max_reasoning_tokens: The reasoning is closed after this many tokens; None leaves it open.
    """

    kind: Literal["json", "regex", "lark", "any"]
    text: str = ""
    path: str = "response_format"
    starts_in_reasoning: bool = False
    max_reasoning_tokens: int | None = None
