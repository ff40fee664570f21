"""What a checkpoint must hold, computed from a configuration alone, before any file is opened.

A `Parameter` is a tensor of the network with its logical shape; a `StoredTensor` is one entry of a safetensors
file. A matrix takes one to four stored tensors, depending on its format. Free of torch and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from halocline.hal.codecs import MXFP4_GROUP
from halocline.hal.errors import ConfigError, lines
from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE, NVFP4_GROUP

__all__ = [
    "REPLICATED",
    "Parameter",
    "Role",
    "Shard",
    "Split",
    "StoredDtype",
    "StoredTensor",
    "WeightPlan",
    "stored_tensors",
]


class StoredDtype(StrEnum):
    """Element types of safetensors files that a checkpoint may use, by their name there."""

    F32 = "F32"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    I8 = "I8"
    U8 = "U8"
    I64 = "I64"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {"F32": 4, "BF16": 2, "I64": 8}.get(self.value, 1)


class Role(StrEnum):
    """How a parameter may be stored: MATRIX in any weight format, FLOAT plainly, INDEX as integers."""

    MATRIX = "matrix"
    FLOAT = "float"
    INDEX = "index"


class Split(StrEnum):
    """Which ranks share a parameter.

    ATTENTION: the ranks of an attention group. EXPERTS: whole experts go to different ranks, and ranks with the same
    experts share their width. SHARED: the ranks of an attention group that is the whole world, if every part is whole
    blocks; else each rank holds all of it.
    """

    ATTENTION = "attention"
    EXPERTS = "experts"
    SHARED = "shared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """How a parameter is split over ranks: `axis` is cut into equal runs of whole units.

    Attributes:
        axis: Axis of the logical shape that is cut, or `None` for a parameter that is the same on every rank.
        unit: What must stay whole: heads, groups, vocabulary, width.
        unit_size: Rows or lanes of one unit.
        split: Which ranks share it.
        expert: Number of the routed expert that owns the parameter, or `None`.
    """

    axis: int | None = None
    unit: str = ""
    unit_size: int = 1
    split: Split = Split.ATTENTION
    expert: int | None = None

    def divides(self, length: int, size: int, *, block: int = 1) -> bool:
        """Whether an axis can be divided among `size` ranks.

        Args:
            length: Of the cut axis.
            size: Ranks; among one, anything can.
            block: Rows or lanes of a quantisation block, of which each part holds a whole number.
        """
        part, rest = divmod(length, size)
        return size == 1 or (rest == 0 and part % self.unit_size == 0 and part % block == 0)

    def ways(self, length: int, *, block: int = 1) -> tuple[int, ...]:
        """Every number of ranks among which an axis can be divided."""
        return tuple(n for n in range(1, length // self.unit_size + 1) if self.divides(length, n, block=block))

    def slice_of(self, length: int, *, rank: int, size: int, block: int = 1) -> slice:
        """Part of the cut axis that one of `size` ranks holds.

        Raises:
            ConfigError: If units or blocks do not divide among the ranks; the message lists the sizes that would.
        """
        if self.axis is None:
            return slice(0, length)
        if not self.divides(length, size, block=block):
            blocks = f", in blocks of {block}" if block > 1 else ""
            raise ConfigError(
                lines(
                    f"cannot split {length // self.unit_size} {self.unit} over {size} ranks",
                    found=f"an axis of {length} in units of {self.unit_size}{blocks}",
                    try_=f"a parallel size of {', '.join(map(str, self.ways(length, block=block)))}",
                )
            )
        step = length // size
        return slice(rank * step, (rank + 1) * step)

    def __str__(self) -> str:
        owner = f"expert {self.expert}" if self.expert is not None else ""
        cut = f"axis {self.axis} by {self.unit}" if self.axis is not None else ""
        return ", ".join(part for part in (owner, cut) if part) or "replicated"


REPLICATED = Shard()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One tensor of the network.

    Attributes:
        name: Original checkpoint name; a matrix ends in `.weight`.
        shape: Logical shape, in elements; (out, in) for a matrix.
        role: How it may be stored.
        dtype: Planned element type of `FLOAT` and `INDEX` parameters, and of matrices in a plain format.
        format: Planned format of a `MATRIX`; a file may hold another one.
        scale_fmt: Planned scales of an FP8_BLOCK matrix.
        shard: How it is split over ranks.
        group: Line of the summary it counts in.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    dtype: StoredDtype
    format: WeightFormat | None = None
    scale_fmt: Literal["ue8m0", "float32"] = "ue8m0"
    shard: Shard = REPLICATED
    group: str = ""

    @property
    def stem(self) -> str:
        """Name without `.weight`, to which scale suffixes are added."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One entry of a safetensors file."""

    name: str
    shape: tuple[int, ...]
    dtype: StoredDtype
    shard: Shard
    group: str

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def stored_tensors(parameter: Parameter) -> Iterator[StoredTensor]:
    """The entries that a parameter takes in a file, in its planned format."""
    p = parameter

    def entry(name: str, shape: tuple[int, ...], dtype: StoredDtype) -> StoredTensor:
        return StoredTensor(name=name, shape=shape, dtype=dtype, shard=p.shard, group=p.group)

    if p.format is None or p.format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16):
        yield entry(p.name, p.shape, p.dtype)
        return
    *stack, out, lanes = p.shape
    if p.format is WeightFormat.FP8_BLOCK:
        blocks = (*stack, -(-out // FP8_BLOCK_SIZE), -(-lanes // FP8_BLOCK_SIZE))
        yield entry(p.name, p.shape, StoredDtype.F8_E4M3)
        yield entry(p.stem + ".scale", blocks, StoredDtype.F8_E8M0 if p.scale_fmt == "ue8m0" else StoredDtype.F32)
        return
    packed = (*stack, out, lanes // 2)
    if p.format is WeightFormat.MXFP4:
        yield entry(p.name, packed, StoredDtype.I8)
        yield entry(p.stem + ".scale", (*stack, out, lanes // MXFP4_GROUP), StoredDtype.F8_E8M0)
        return
    yield entry(p.name, packed, StoredDtype.U8)
    yield entry(p.stem + ".weight_scale", (*stack, out, lanes // NVFP4_GROUP), StoredDtype.F8_E4M3)
    yield entry(p.stem + ".weight_scale_2", tuple(stack), StoredDtype.F32)
    yield entry(p.stem + ".input_scale", tuple(stack), StoredDtype.F32)


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """All parameters of a network, in the order of the forward pass."""

    parameters: tuple[Parameter, ...]

    @cached_property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All entries of the checkpoint's files."""
        return tuple(entry for parameter in self.parameters for entry in stored_tensors(parameter))

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        """Parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def num_tensors(self) -> int:
        """Number of entries."""
        return len(self.tensors)

    @property
    def num_elements(self) -> int:
        """Numbers that the network consists of: parameters as papers count them, without index tables."""
        return sum(math.prod(p.shape) for p in self.parameters if p.role is not Role.INDEX)
