"""The header of a safetensors file: names, element types, shapes and byte ranges, read without torch.

A file is checked for its size here, so that a truncated one is found before any memory is taken for it.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halocline.hal.errors import CheckpointError, lines

__all__ = ["FileHeader", "HeaderEntry", "read_header"]

_LENGTH_BYTES = 8
_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderEntry:
    """One tensor of a file.

    Attributes:
        dtype: Element type as the format spells it.
        shape: Shape.
        start: First byte, counted from the beginning of the file.
        nbytes: Bytes of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """All tensors of a file, by name."""

    path: Path
    entries: dict[str, HeaderEntry]


def read_header(path: Path) -> FileHeader:
    """Reads and checks a file's header.

    Raises:
        CheckpointError: If the header is damaged, or the file is shorter or longer than the header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else size
            if length > size - _LENGTH_BYTES:
                raise _damaged(path, f"a header of {length} bytes does not fit a file of {size}")
            raw = json.loads(file.read(length))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    if not isinstance(raw, dict):
        raise _damaged(path, "its header is not a JSON object")
    raw.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    entries = {name: _entry(path, name, fields, data_start) for name, fields in raw.items()}
    _check_ranges(path, entries, data_start, size)
    return FileHeader(path=path, entries=entries)


def _entry(path: Path, name: str, fields: Any, data_start: int) -> HeaderEntry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        bits = _ITEM_BITS[dtype] * math.prod(shape)
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and 8 * (end - begin) == bits
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the header's entry of tensor {name} is malformed ({error!r})") from error
    if not sound:
        raise _damaged(path, f"tensor {name}: {dtype} {list(shape)} does not take bytes {begin} to {end}")
    return HeaderEntry(dtype=dtype, shape=shape, start=data_start + begin, nbytes=end - begin)


def _check_ranges(path: Path, entries: dict[str, HeaderEntry], data_start: int, size: int) -> None:
    """Tensors must fill the file without gap or overlap, as the format demands."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != position:
            raise _damaged(path, f"tensor {name} begins at byte {entry.start}, expected {position}")
        position += entry.nbytes
    if position != size:
        state = "truncated" if size < position else "longer than it should be"
        raise _damaged(path, f"it is {state}: its header describes {position} bytes, the file has {size}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        lines(f"damaged checkpoint file {path}", found=what, try_="download or copy this file again")
    )
