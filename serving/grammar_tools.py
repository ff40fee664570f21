"""Grammars of tool calls in the model's own markup (DSML), made from the tools' schemas.

Used where a call is required, a function is named, parallel calls are switched off, or a tool is strict. The markup
token is a control token and stands in the grammar by its id. Parameters come in the order of the schema; those that
the schema does not require may be left out.

A text value may contain anything but the markup token, `</` included; so its grammar is split at each `/` that follows
a `<`: a lexer that takes as much as it can (llguidance's does) then never swallows the end mark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OfferedTool", "ToolGrammar", "tool_grammar"]

_TEXT_RULES = r"""
value: (TEXT SLASH)+
SLASH: "/"
TEXT: /(?s:.*)/ & ~/(?s:.*<\/.*)/
"""
_FREE_RULE = "\nfree: FREE\nFREE: /(?s:.*)/"
_TEXT_KEYWORDS = ("pattern", "minLength", "maxLength")


@dataclass(frozen=True, kw_only=True)
class OfferedTool:
    """A function that the model may call.

    Attributes:
        name: Of the function.
        schema: JSON schema of its parameters.
        strict: Whether a schema that cannot be enforced in full is refused.
    """

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class ToolGrammar:
    """What is asked of the calls of an answer.

    Attributes:
        tools: Functions that may be called.
        required: Whether there must be a call; otherwise free text may stand alone or come first.
        parallel: Whether there may be more than one call.
        markup_id: Id of the markup token.
        answer: JSON schema of an answer without calls; None leaves it free.
    """

    tools: Sequence[OfferedTool]
    required: bool
    parallel: bool
    markup_id: int
    answer: Mapping[str, Any] | None = None


def tool_grammar(asked: ToolGrammar) -> str:
    """The grammar, in llguidance's dialect of Lark."""
    mark = f"<[{asked.markup_id}]>"
    calls = "call+" if asked.parallel else "call"
    block = f'{mark} "tool_calls>\\n" {calls} "</" {mark} "tool_calls>"'
    if asked.required:
        start = f'start: "\\n\\n<" {block}'
    elif asked.answer is not None:
        start = f'start: answer | "\\n\\n<" {block}\nanswer: %json {json.dumps(asked.answer)}'
    else:
        start = f"start: free ({block})?{_FREE_RULE}"
    rules = [start, f"call: {' | '.join(f'call_{index}' for index in range(len(asked.tools)))}"]
    for index, tool in enumerate(asked.tools):
        rules.extend(_call_rules(index, tool, mark))
    return "\n".join(rules) + _TEXT_RULES


def _call_rules(index: int, tool: OfferedTool, mark: str) -> list[str]:
    schema = tool.schema
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = set(schema.get("required") or ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, rules = [], []
    for number, (key, stated) in enumerate(properties.items()):
        rule = f"arg_{index}_{number}"
        parts.append(rule if key in required else f"{rule}?")
        rules.extend(_argument_rules(rule, key, stated, mark, shared, not tool.strict))
    head = _quoted(f'invoke name="{tool.name}">\n')
    body = " ".join(parts)
    return [f'call_{index}: "<" {mark} {head} {body} "</" {mark} "invoke>\\n"', *rules]


def _argument_rules(rule: str, key: str, stated: Any, mark: str, shared: Mapping[str, Any], lenient: bool) -> list[str]:
    """One parameter: as raw text where its schema lets it be a text, as JSON where it lets it be something else."""
    schema = stated if isinstance(stated, Mapping) else {}
    texts, others = _split(schema)
    forms, rules = [], []
    end = f'"</" {mark} "parameter>\\n"'
    if texts is not None:
        head = _quoted(f'parameter name="{key}" string="true">')
        if texts == "value":
            forms.append(f'"<" {mark} {head} value {mark} "parameter>\\n"')
        else:
            forms.append(f'"<" {mark} {head} {rule.upper()} {end}')
            rules.append(f"{rule.upper()}: {texts}")
    if others is not None:
        head = _quoted(f'parameter name="{key}" string="false">')
        forms.append(f'"<" {mark} {head} {rule}_json {end}')
        whole = {**others, **shared}
        if lenient:
            whole["x-guidance"] = {"lenient": True}
        rules.append(f"{rule}_json: %json {json.dumps(whole)}")
    return [f"{rule}: {' | '.join(forms)}", *rules]


def _split(schema: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """The grammar of the text that a schema allows, and the schema of what else it allows; None where nothing is."""
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(allowed, list):
        texts = [_quoted(one) for one in allowed if isinstance(one, str) and "</" not in one]
        rest = [one for one in allowed if not isinstance(one, str)]
        return (f"({' | '.join(texts)})" if texts else None), ({"enum": rest} if rest else None)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(alternatives, list) and any(isinstance(one, Mapping) for one in alternatives):
            return _split_alternatives([one for one in alternatives if isinstance(one, Mapping)])
        return (None, dict(schema)) if schema else ("value", {})
    others = [kind for kind in kinds if kind != "string"]
    bare = {key: one for key, one in schema.items() if key not in _TEXT_KEYWORDS}
    return (_text_form(schema) if "string" in kinds else None), ({**bare, "type": others} if others else None)


def _split_alternatives(alternatives: Sequence[Mapping[str, Any]]) -> tuple[str | None, dict[str, Any] | None]:
    parts = [_split(one) for one in alternatives]
    texts = [text for text, _ in parts if text is not None]
    others = [other for _, other in parts if other is not None]
    text = None if not texts else "value" if "value" in texts else f"({' | '.join(texts)})"
    return text, (None if not others else others[0] if len(others) == 1 else {"anyOf": others})


def _text_form(schema: Mapping[str, Any]) -> str:
    """`value`, any text; or a terminal without `<` that a pattern and bounds of the length ask for."""
    if not any(key in schema for key in _TEXT_KEYWORDS):
        return "value"
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    forms = [f"/(?s:[^<]{{{low},{high}}})/"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if pattern.endswith("$") else "(?s:.*)"
        bare = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
        forms.append(f"/{before}({bare}){after}/")
    return " & ".join(forms)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
