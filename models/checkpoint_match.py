"""Matching the tensors of files with the parameters of a plan, before memory is taken. Free of torch.

A file's tensor may be a parameter, a part of one (a scale), many of them (stacked experts), or nothing new (a
copy). The format of a matrix follows from the element types of its parts, never from the model's name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from halocline.hal.codecs import MXFP4_GROUP
from halocline.hal.errors import CheckpointError
from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE, NVFP4_GROUP
from halocline.models.safetensors_header import HeaderEntry
from halocline.models.weight_plan import Parameter, Role, WeightPlan

__all__ = ["PLAIN_FORMATS", "Lanes", "NameResolver", "Part", "Piece", "Placement", "StoredParameter", "match"]


class Part(StrEnum):
    """What a stored tensor is to its parameter."""

    DATA = "data"
    SCALE = "scale"
    GLOBAL_SCALE = "global scale"
    INPUT_SCALE = "input scale"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A parameter's part inside a stored tensor.

    Attributes:
        parameter: Original name.
        part: Which part of it.
        index: Entry on the first axis of a stack of experts, or `None` for the whole tensor.
        rows: Rows inside that entry.
    """

    parameter: str
    part: Part = Part.DATA
    index: int | None = None
    rows: tuple[int, int] | None = None


NameResolver = Callable[[str, tuple[int, ...]], list[Piece]]


class Lanes(NamedTuple):
    """Lanes `first` to `last` of rows that have `width` lanes in the file."""

    first: int
    last: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a part lies.

    Attributes:
        file: Which file.
        name: The tensor's name there.
        dtype: Its element type there.
        shape: Shape of what is wanted.
        start: First byte to read.
        nbytes: Bytes to read.
        lanes: What to keep of the rows read; `None` for all of it.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    lanes: Lanes | None = None

    @property
    def nbytes_kept(self) -> int:
        """Bytes of what is wanted."""
        return self.nbytes if self.lanes is None else self.nbytes // self.lanes.width * self.shape[-1]


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """A parameter as the files hold it.

    Attributes:
        parameter: What the plan says.
        format: Format found, for a matrix.
        parts: Where its data and scales lie.
    """

    parameter: Parameter
    format: WeightFormat | None
    parts: Mapping[Part, Placement]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, of what is wanted of them."""
        return sum(placement.nbytes_kept for placement in self.parts.values())


_Expected = dict[Part, tuple[tuple[str, ...], tuple[int, ...]]]
PLAIN_FORMATS = {"F32": WeightFormat.FLOAT32, "BF16": WeightFormat.BFLOAT16}
_ACCEPTED = {Role.FLOAT: ("F32", "BF16"), Role.INDEX: ("I64",)}


@dataclass(frozen=True, kw_only=True)
class _Problem:
    kind: str
    text: str


def match(
    plan: WeightPlan, tensors: Iterable[tuple[Path, str, HeaderEntry]], resolve: NameResolver, *, source: str
) -> dict[str, StoredParameter]:
    """Ties every stored tensor to its parameter and every parameter to its stored tensors.

    Args:
        plan: What the configuration demands.
        tensors: File, name and header entry of all tensors of all files.
        resolve: The family's spelling of names.
        source: Folder, for messages.

    Returns:
        The stored parameters by original name, one for each parameter of the plan.

    Raises:
        CheckpointError: If a tensor is missing, unknown, given twice, of another shape or type than its parameter,
            or without its scale. All problems are counted, the first of each kind are listed.
    """
    problems: list[_Problem] = []
    found: dict[str, dict[Part, Placement]] = {}
    for file, name, entry in tensors:
        for piece in resolve(name, entry.shape):
            if piece.parameter not in plan.by_name:
                problems.append(_Problem(kind="unknown", text=f"{name} in {file.name}"))
                break
            parts = found.setdefault(piece.parameter, {})
            placement = _place(file, name, entry, piece)
            if piece.part in parts:
                text = f"{piece.part} of {piece.parameter}: {_where(parts[piece.part])} and {_where(placement)}"
                problems.append(_Problem(kind="twice", text=text))
            parts[piece.part] = placement
    stored = {}
    for parameter in plan.parameters:
        parts = found.get(parameter.name, {})
        checked = _check(parameter, parts)
        if isinstance(checked, _Problem):
            problems.append(checked)
        else:
            stored[parameter.name] = checked
    if problems:
        raise CheckpointError(_describe(problems, source))
    return stored


def _place(file: Path, name: str, entry: HeaderEntry, piece: Piece) -> Placement:
    """Narrows an entry to the rows of a piece; rows of one expert are contiguous."""
    shape, start, nbytes = entry.shape, entry.start, entry.nbytes
    if piece.index is not None and piece.rows is not None:
        first, last = piece.rows
        row_bytes = nbytes // max(math.prod(shape[:2]), 1)
        start += (piece.index * shape[1] + first) * row_bytes
        nbytes = (last - first) * row_bytes
        shape = (last - first, *shape[2:])
    return Placement(file=file, name=name, dtype=entry.dtype, shape=shape, start=start, nbytes=nbytes)


def _where(placement: Placement) -> str:
    return f"{placement.name} in {placement.file.name}"


def _check(parameter: Parameter, parts: Mapping[Part, Placement]) -> StoredParameter | _Problem:
    if Part.DATA not in parts:
        stray = next(iter(parts.values()), None)
        beside = f" (its scale is {_where(stray)})" if stray else ""
        return _Problem(kind="missing", text=parameter.name + beside)
    if parameter.role is not Role.MATRIX:
        problem = _compare(parts, {Part.DATA: (_ACCEPTED[parameter.role], parameter.shape)})
        return problem or StoredParameter(parameter=parameter, format=None, parts=parts)
    found = _format_of(parts)
    if isinstance(found, _Problem):
        return found
    problem = _compare(parts, _expected_parts(found, parameter.shape))
    return problem or StoredParameter(parameter=parameter, format=found, parts=parts)


def _format_of(parts: Mapping[Part, Placement]) -> WeightFormat | _Problem:
    """Decides the format of a matrix from the element types of its data and scale."""
    data, scale = parts[Part.DATA], parts.get(Part.SCALE)
    if data.dtype in PLAIN_FORMATS:
        return PLAIN_FORMATS[data.dtype]
    if data.dtype not in ("F8_E4M3", "I8", "U8"):
        return _wrong_dtype(data, (*PLAIN_FORMATS, "F8_E4M3", "I8 or U8 (packed FP4)"))
    if scale is None:
        return _Problem(kind="missing scale", text=f"of {_where(data)}, stored as {data.dtype}")
    if data.dtype == "F8_E4M3":
        return WeightFormat.FP8_BLOCK
    return WeightFormat.MXFP4 if scale.dtype == "F8_E8M0" else WeightFormat.NVFP4


def _expected_parts(found: WeightFormat, shape: tuple[int, ...]) -> _Expected:
    """Element types and shape of each part that a matrix of this format has."""
    out, lanes = shape
    packed = (("I8", "U8"), (out, lanes // 2))
    if found is WeightFormat.FP8_BLOCK:
        blocks = (-(-out // FP8_BLOCK_SIZE), -(-lanes // FP8_BLOCK_SIZE))
        return {Part.DATA: (("F8_E4M3",), shape), Part.SCALE: (("F8_E8M0", "F32"), blocks)}
    if found is WeightFormat.MXFP4:
        return {Part.DATA: packed, Part.SCALE: (("F8_E8M0",), (out, lanes // MXFP4_GROUP))}
    if found is WeightFormat.NVFP4:
        scale = (("F8_E4M3",), (out, lanes // NVFP4_GROUP))
        return {Part.DATA: packed, Part.SCALE: scale, Part.GLOBAL_SCALE: (("F32",), ())}
    return {Part.DATA: (tuple(PLAIN_FORMATS), shape)}


def _compare(parts: Mapping[Part, Placement], expected: _Expected) -> _Problem | None:
    data = parts[Part.DATA]
    for part, (dtypes, shape) in expected.items():
        placement = parts.get(part)
        if placement is None:
            return _Problem(kind="missing scale", text=f"{part} of {_where(data)}, stored as {data.dtype}")
        if placement.dtype not in dtypes:
            return _wrong_dtype(placement, dtypes)
        is_scalar = not shape and math.prod(placement.shape) == 1  # files hold a scalar as [] or as [1]
        if placement.shape != shape and not is_scalar:
            text = f"{_where(placement)}: {list(placement.shape)}, expected {list(shape)}"
            return _Problem(kind="wrong shape", text=text)
    for part, placement in parts.items():
        optional = part is Part.INPUT_SCALE and Part.GLOBAL_SCALE in expected
        if part not in expected and not optional:
            text = f"{_where(placement)}: its matrix has no use for a {part} ({data.dtype})"
            return _Problem(kind="unknown", text=text)
    return None


def _wrong_dtype(placement: Placement, accepted: tuple[str, ...]) -> _Problem:
    text = f"{_where(placement)}: {placement.dtype}, expected {', '.join(accepted)}"
    return _Problem(kind="wrong dtype", text=text)


def _describe(problems: list[_Problem], source: str, *, shown: int = 4) -> str:
    """One message: how many problems of which kind, and the first few of each."""
    counts = Counter(problem.kind for problem in problems)
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    width = max(len(kind) for kind in counts)
    rows = [f"{source}: the files do not fit config.json ({total})"]
    for kind, count in counts.items():
        texts = [problem.text for problem in problems if problem.kind == kind]
        rows += [f"  {kind.ljust(width)}  {text}" for text in texts[:shown]]
        if count > shown:
            rows.append(f"  {' ' * width}  and {count - shown} more")
    hint = "use config.json and files of one download, or plan-weights to list what config.json demands"
    return "\n".join([*rows, f"  {'try'.ljust(width)}  {hint}"])
