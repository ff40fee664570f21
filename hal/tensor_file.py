"""safetensors files, written and read with torch alone: a length, a JSON header, the tensors' bytes.

The HAL depends on no library but torch, and the format is a page long. Tests compare it with the library.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.hal.errors import InputError, lines

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["read_tensors", "write_tensors"]

_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_HEADER_LIMIT = 100 * 1024 * 1024


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors and string metadata; the file appears whole or not at all."""
    codes = {name: code for code, name in _CODES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    rows = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in rows.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": codes[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in rows.values():
            size = tensor.numel() * tensor.element_size()
            file.write(ctypes.string_at(tensor.data_ptr(), size) if size else b"")
    partial.replace(path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the tensors and the metadata of a file.

    Raises:
        InputError: If it is no such file, or is cut short.
    """
    try:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        if length > min(_HEADER_LIMIT, len(content) - 8):
            raise ValueError(f"a header of {length} bytes in a file of {len(content)}")
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        metadata: dict[str, str] = header.pop("__metadata__", {})
        data = memoryview(bytearray(content[8 + length :]))
        return {name: _tensor(row, data) for name, row in header.items()}, metadata
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        message = lines(f"cannot read the tensors of {path}", found=error, try_="write the file again")
        raise InputError(message) from error


def _tensor(row: Mapping[str, Any], data: memoryview) -> Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, _CODES[row["dtype"]])
    start, stop = row["data_offsets"]
    if stop > len(data):
        raise ValueError(f"tensor ends at byte {stop}, the file has {len(data)}")
    if start == stop:
        return torch.empty(row["shape"], dtype=dtype)
    return torch.frombuffer(data[start:stop], dtype=torch.uint8).clone().view(dtype).reshape(row["shape"])
