"""The values of an op call: copied, named, compared in a form that does not depend on the kernel, and written down.

Arguments and results are tensors, plain values, the data classes and named tuples of the contracts, and weights that
a kernel has converted. A converted weight is opaque, so `Prepared` keeps what it was made from.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from halocline.hal.errors import InputError
from halocline.hal.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Prepared", "bind_arguments", "clone", "decode", "encode", "named_tensors"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A weight as converted by one or more kernels, with the arguments of the conversion.

    Attributes:
        op: The op whose weight it is.
        arguments: What the load-time conversion was given.
        forms: What each kernel made of it.
    """

    op: str
    arguments: Mapping[str, Any]
    forms: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of a matrix."""
        return cast("tuple[int, ...]", self.forms[0].shape)

    @property
    def num_experts(self) -> int:
        """Experts held by this process."""
        return cast(int, self.forms[0].num_experts)


def bind_arguments(op: Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the contract's names, defaults included."""
    bound = op.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _is_tensor(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr")


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _parts(value: Any) -> Iterator[Any]:
    """Elements of a list or tuple."""
    return iter(value)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Items of a dictionary."""
    return iter(value.items())


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a data class or named tuple."""
    if hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def clone(value: Any) -> Any:
    """A copy that shares no tensor memory with the original."""
    return _map_tensors(value, lambda tensor: tensor.detach().clone())


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if _is_tensor(value):
        return change(value)
    if hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(part, change) for part in value))
    if _is_record(value) and not isinstance(value, Prepared):
        return dataclasses.replace(value, **{n: _map_tensors(part, change) for n, part in _fields(value).items()})
    if isinstance(value, dict):
        return {key: _map_tensors(part, change) for key, part in _items(value)}
    if isinstance(value, list | tuple):
        parts: list[Any] = [_map_tensors(part, change) for part in _parts(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside a value, named by its path; scratch memory of kernels is left out."""
    if _is_tensor(value):
        yield name, value
    elif hasattr(value, "_fields") or _is_record(value):
        for field, part in _fields(value).items():
            if field != "kernel_state":
                yield from named_tensors(part, f"{name}.{field}")
    elif isinstance(value, dict):
        for key, part in _items(value):
            yield from named_tensors(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(_parts(value)):
            yield from named_tensors(part, f"{name}.{number}")


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Turns a value into JSON, putting its tensors aside under their paths.

    Raises:
        InputError: If a record cannot hold it.
    """
    if _is_tensor(value):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, Prepared):
        return {"prepared": value.op, "arguments": _encode_fields(value.arguments, name, tensors)}
    if hasattr(value, "_fields") or _is_record(value):
        fields: dict[str, Any] = {n: {} if n == "kernel_state" else v for n, v in _fields(value).items()}
        return {"class": _class_name(value), "fields": _encode_fields(fields, name, tensors)}
    if isinstance(value, dict):
        return {"dict": [[key, encode(part, f"{name}.{key}", tensors)] for key, part in _items(value)]}
    if isinstance(value, list | tuple):
        parts = [encode(part, f"{name}.{n}", tensors) for n, part in enumerate(_parts(value))]
        return {"list" if isinstance(value, list) else "tuple": parts}
    return _encode_plain(value, name)


def _encode_plain(value: Any, name: str) -> Any:
    if isinstance(value, Enum):
        return {"enum": _class_name(value), "value": value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return {"dtype": str(value).removeprefix("torch.")}
    raise InputError(f"{name} is a {type(value).__name__}, which a record cannot hold")


def decode(value: Any, tensors: Mapping[str, Tensor], prepare: Callable[[str, Mapping[str, Any]], Any]) -> Any:
    """The reverse of `encode`; `prepare` converts a weight for an op again."""
    if not isinstance(value, dict):
        return value
    row = cast("dict[str, Any]", value)
    if "tensor" in row:
        return tensors[row["tensor"]]
    if "prepared" in row:
        return prepare(row["prepared"], _decode_fields(row["arguments"], tensors, prepare))
    if "class" in row:
        return _contract_class(row["class"])(**_decode_fields(row["fields"], tensors, prepare))
    if "dict" in row:
        return {key: decode(part, tensors, prepare) for key, part in row["dict"]}
    return _decode_plain(row, tensors, prepare)


def _decode_plain(
    row: dict[str, Any], tensors: Mapping[str, Tensor], prepare: Callable[[str, Mapping[str, Any]], Any]
) -> Any:
    if "enum" in row:
        return _contract_class(row["enum"])(row["value"])
    if "dtype" in row:
        import torch

        return getattr(torch, row["dtype"])
    parts = [decode(part, tensors, prepare) for part in row.get("list", row.get("tuple", []))]
    return parts if "list" in row else tuple(parts)


def _encode_fields(fields: Mapping[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {field: encode(part, f"{name}.{field}", tensors) for field, part in fields.items()}


def _decode_fields(
    fields: Mapping[str, Any], tensors: Mapping[str, Tensor], prepare: Callable[[str, Mapping[str, Any]], Any]
) -> dict[str, Any]:
    return {field: decode(part, tensors, prepare) for field, part in fields.items()}


def _class_name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__name__}"


def _contract_class(name: str) -> Any:
    """A class of the contracts; a file may name no other."""
    module, _, attribute = name.partition(":")
    if not module.startswith("halocline.hal."):
        raise InputError(f"a record names the class {name!r}, which is none of the contracts")
    return getattr(importlib.import_module(module), attribute)
