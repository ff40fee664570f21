"""Fields of a request as data: one description that validates bodies, makes the OpenAPI document and `docs/api.md`.

A schema is a JSON Schema of the small dialect below, so that it can stand in an OpenAPI document as it is. Every field
that a protocol knows is either honoured (`description` says how) or refused (`x-refused` says why). A refused field
may carry its neutral values, those that ask for nothing; any other value is answered with a 400 that names the field.
A field that is null counts as left out, as in the protocols themselves.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halocline.serving.errors import ApiError, bad_field

__all__ = [
    "Schema",
    "any_of",
    "array",
    "boolean",
    "check",
    "choice",
    "described",
    "free_object",
    "integer",
    "number",
    "object_",
    "refused",
    "string",
    "tagged",
]

Schema = dict[str, Any]

_SHOWN = 80


# ---- building ---------------------------------------------------------------------------------------------------


def described(schema: Schema, about: str) -> Schema:
    """The schema with a sentence on what the field does."""
    return {**schema, "description": about}


def boolean(about: str = "") -> Schema:
    """True or false."""
    return _with(about, {"type": "boolean"})


def integer(low: int, high: int, about: str = "") -> Schema:
    """A whole number from low to high."""
    return _with(about, {"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float, about: str = "") -> Schema:
    """A number from low to high."""
    return _with(about, {"type": "number", "minimum": low, "maximum": high})


def string(about: str = "", *, least: int = 0, most: int | None = None, pattern: str | None = None) -> Schema:
    """A text, of bounded length or form."""
    schema: Schema = {"type": "string"}
    if least:
        schema["minLength"] = least
    if most is not None:
        schema["maxLength"] = most
    if pattern is not None:
        schema["pattern"] = pattern
    return _with(about, schema)


def choice(*values: str, about: str = "") -> Schema:
    """One of some words."""
    return _with(about, {"type": "string", "enum": list(values)})


def array(items: Schema, about: str = "", *, least: int = 0, most: int | None = None) -> Schema:
    """A list."""
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return _with(about, schema)


def object_(properties: Mapping[str, Schema], about: str = "", *, required: Sequence[str] = ()) -> Schema:
    """An object with known fields only."""
    schema: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    return _with(about, schema)


def free_object(about: str = "", *, values: Schema | None = None, most: int | None = None) -> Schema:
    """An object with fields of any name."""
    schema: Schema = {"type": "object", "additionalProperties": True if values is None else values}
    if most is not None:
        schema["maxProperties"] = most
    return _with(about, schema)


def any_of(*schemas: Schema, about: str = "") -> Schema:
    """One of several kinds of value, told apart by their JSON type."""
    return _with(about, {"anyOf": list(schemas)})


def tagged(tag: str, variants: Mapping[str, Schema], about: str = "") -> Schema:
    """One of several objects, told apart by a field that names the kind."""
    schemas = []
    for name, variant in variants.items():
        properties = {tag: {"type": "string", "enum": [name]}, **variant.get("properties", {})}
        schemas.append({**variant, "properties": properties, "required": [tag, *variant.get("required", ())]})
    return _with(about, {"oneOf": schemas, "x-tag": tag})


def refused(reason: str, *neutral: Any) -> Schema:
    """A field that is not supported; its neutral values ask for nothing and are let through."""
    return {"enum": [None, *neutral], "x-refused": reason}


def _with(about: str, schema: Schema) -> Schema:
    return {**schema, "description": about} if about else schema


# ---- checking ---------------------------------------------------------------------------------------------------


def check(schema: Schema, value: Any, path: str = "") -> None:
    """Checks a value, or raises an `ApiError` of status 400 that names the field.

    Args:
        schema: Of the dialect above.
        value: As `json.loads` gives it.
        path: Name of the value in messages; empty for the body itself.
    """
    if "x-refused" in schema:
        if value not in schema["enum"] or (isinstance(value, bool) and not _holds_bool(schema["enum"], value)):
            raise bad_field(path, f"is not supported: {schema['x-refused']}", code="unsupported_parameter")
        return
    if "anyOf" in schema:
        _check_any(schema["anyOf"], value, path)
    elif "oneOf" in schema:
        _check_tagged(schema, value, path)
    elif "type" in schema:
        _CHECKS[schema["type"]](schema, value, path)


def _holds_bool(values: list[Any], value: bool) -> bool:
    return any(one is value for one in values)


def _check_any(schemas: Sequence[Schema], value: Any, path: str) -> None:
    """Checks against the first schema of the value's type, so that the message is about what was meant."""
    fitting = [schema for schema in schemas if _fits(schema, value)]
    if not fitting:
        names = " or ".join(dict.fromkeys(_name(schema) for schema in schemas))
        raise bad_field(path, f"must be {names}, not {_shown(value)}", code="invalid_type")
    for schema in fitting[:-1]:
        try:
            check(schema, value, path)
        except ApiError:
            continue
        return
    check(fitting[-1], value, path)


def _check_tagged(schema: Schema, value: Any, path: str) -> None:
    tag = schema["x-tag"]
    if not isinstance(value, dict):
        raise bad_field(path, f"must be an object, not {_shown(value)}", code="invalid_type")
    known = {variant["properties"][tag]["enum"][0]: variant for variant in schema["oneOf"]}
    if tag not in value:
        raise bad_field(_join(path, tag), f"is missing; it is one of {', '.join(known)}", code="missing_field")
    name = value[tag]
    if not isinstance(name, str) or name not in known:
        raise bad_field(_join(path, tag), f"must be one of {', '.join(known)}, not {_shown(name)}")
    check(known[name], value, path)


def _check_object(schema: Schema, value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise bad_field(path, f"must be an object, not {_shown(value)}", code="invalid_type")
    if len(value) > schema.get("maxProperties", len(value)):
        raise bad_field(path, f"must hold at most {schema['maxProperties']} fields, not {len(value)}")
    properties: dict[str, Schema] = schema.get("properties", {})
    required = schema.get("required", ())
    for name in required:
        if value.get(name) is None:
            raise bad_field(_join(path, name), "is missing", code="missing_field")
    others = schema.get("additionalProperties", True)
    for name, one in value.items():
        if name in properties:
            if one is not None:
                check(properties[name], one, _join(path, name))
        elif others is False:
            raise _unknown(_join(path, name), name, properties)
        elif others is not True:
            check(others, one, _join(path, name))


def _check_array(schema: Schema, value: Any, path: str) -> None:
    if not isinstance(value, list):
        raise bad_field(path, f"must be a list, not {_shown(value)}", code="invalid_type")
    if len(value) < schema.get("minItems", 0):
        raise bad_field(path, f"must hold at least {schema['minItems']} items, not {len(value)}")
    if len(value) > schema.get("maxItems", len(value)):
        raise bad_field(path, f"must hold at most {schema['maxItems']} items, not {len(value)}")
    items = schema["items"]
    if items.get("type") == "integer" and value and set(map(type, value)) == {int}:
        _check_range(items, min(value), f"{path}[]")
        _check_range(items, max(value), f"{path}[]")
        return
    for index, one in enumerate(value):
        check(items, one, f"{path}[{index}]")


def _check_string(schema: Schema, value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise bad_field(path, f"must be a text, not {_shown(value)}", code="invalid_type")
    if "enum" in schema and value not in schema["enum"]:
        close = difflib.get_close_matches(value[:_SHOWN], schema["enum"], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise bad_field(path, f"must be one of {', '.join(schema['enum'])}, not {_shown(value)}{hint}")
    if len(value) < schema.get("minLength", 0):
        raise bad_field(path, "must not be empty")
    if len(value) > schema.get("maxLength", len(value)):
        raise bad_field(path, f"must hold at most {schema['maxLength']} characters, not {len(value)}")
    if "pattern" in schema and re.fullmatch(schema["pattern"], value) is None:
        raise bad_field(path, f"must match {schema['pattern']}, not {_shown(value)}")


def _check_boolean(_schema: Schema, value: Any, path: str) -> None:
    if not isinstance(value, bool):
        raise bad_field(path, f"must be true or false, not {_shown(value)}", code="invalid_type")


def _check_integer(schema: Schema, value: Any, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_field(path, f"must be a whole number, not {_shown(value)}", code="invalid_type")
    _check_range(schema, value, path)


def _check_number(schema: Schema, value: Any, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise bad_field(path, f"must be a number, not {_shown(value)}", code="invalid_type")
    _check_range(schema, value, path)


def _check_range(schema: Schema, value: float, path: str) -> None:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    if not low <= value <= high:
        raise bad_field(path, f"must be from {low} to {high}, not {_shown(value)}")


_CHECKS: dict[str, Callable[[Schema, Any, str], None]] = {
    "object": _check_object,
    "array": _check_array,
    "string": _check_string,
    "boolean": _check_boolean,
    "integer": _check_integer,
    "number": _check_number,
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
}


def _fits(schema: Schema, value: Any) -> bool:
    kind = "object" if "oneOf" in schema else schema["type"]
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "array" and isinstance(value, list) and value and "type" in schema["items"]:
        return isinstance(value[0], _TYPES[schema["items"]["type"]])
    return isinstance(value, _TYPES[kind])


def _name(schema: Schema) -> str:
    if "oneOf" in schema:
        return "an object"
    if schema["type"] == "array" and schema["items"].get("type") in _NAMES:
        return f"a list of {_NAMES[schema['items']['type']].removeprefix('a ').removeprefix('an ')}s"
    return _NAMES[schema["type"]]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    """A value as a message may repeat it: short, and nothing of what is inside a container."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    text = repr(value) if not isinstance(value, int) else "a number of that size" if abs(value) >= 2**64 else str(value)
    text = str(value).lower() if isinstance(value, bool) else text
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _unknown(path: str, name: str, known: Mapping[str, Schema]) -> ApiError:
    close = difflib.get_close_matches(name[:_SHOWN], list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    shown = path if len(path) <= _SHOWN else path[:_SHOWN] + "..."
    return bad_field(shown, f"is not a known field{hint}", code="unknown_parameter")
