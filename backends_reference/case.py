"""Case: one input of an op, as a small program over bound kernels.

A case builds its inputs from a seed on the CPU, moves them to the device, calls the op through the `Ops` it is given
(its own allocations and load-time conversions included, so that each kernel sees its own layouts) and returns what
must agree. Parity runs one case with the reference on the CPU and with a candidate on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from halocline.hal.call_outputs import comparable
from halocline.hal.call_values import bind_arguments
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops import find_op
from halocline.hal.ops.rope import RopeTable
from halocline.hal.weight_codecs import quantize_weight, to_fnuz

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = [
    "DTYPES",
    "Case",
    "Dialect",
    "Size",
    "call",
    "dialect_of",
    "generator",
    "normal",
    "rope_table",
    "stored_weight",
]

Size = Literal["small", "model"]
Dialect = Literal["ocp", "fnuz"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WITH_FP8_CODES = ("fp8_block", "nvfp4", "fp8_block64", "fp8_row")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input of one op.

    Attributes:
        op: `family.op`.
        name: What is special about it, for example `ragged` or `empty`.
        dtype: Key of the op's tolerance: `float32` or `bfloat16`.
        run: Takes the kernels and a device name; returns named outputs, whose defined elements must agree.
        formats: Formats that a kernel must take to be asked, for example `{"weight": "mxfp4"}`.
        semantics: Numeric meanings that a kernel must honour to be asked, for example `{"cache_format": "float32"}`.
        traits: Facts that a kernel may restrict, for example `{"head_dim": 128}`.
        size: `small` is affordable on a CPU; `model` has the sizes of a released model.
    """

    op: str
    name: str
    dtype: str
    run: Callable[[Ops, str], Mapping[str, Tensor]]
    formats: Mapping[str, str]
    semantics: Mapping[str, str] = field(default_factory=dict[str, str])
    traits: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    size: Size = "small"

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.dtype}"


def call(ops: Ops, name: str, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Calls the bound kernel of an op; gives what must agree of its result and of what it wrote, on the CPU.

    Rows of padding are dropped, chosen rows and experts sorted, undefined scores zeroed, caches read as values.
    """
    op = find_op(name)
    assert op is not None
    family, _, short = name.partition(".")
    result = getattr(getattr(ops, family), short)(*args, **kwargs)
    arguments = bind_arguments(op, args, kwargs)
    found = comparable(op, arguments, result, read_rows=ops.kv_cache.read_rows)
    return {label: tensor.detach().cpu() for label, tensor in found.items()}


def generator(seed: int) -> torch.Generator:
    """A CPU generator, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(seed)


def normal(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal numbers of an element type."""
    return (torch.randn(*shape, generator=gen) * std).to(dtype)


def dialect_of(stored: str, dialect: Dialect = "ocp") -> str:
    """The FP8 dialect that bytes of a format are in; `none` where it has no FP8 codes."""
    return dialect if stored in _WITH_FP8_CODES else "none"


def stored_weight(
    gen: torch.Generator,
    *shape: int,
    weight_format: str,
    device: str,
    scale_fmt: str = "",
    dialect: Dialect = "ocp",
) -> Weight:
    """A random matrix or stack of matrices as a checkpoint stores it, of a size that keeps a product near 1."""
    values = normal(gen, *shape, std=shape[-1] ** -0.5)
    kind = WeightFormat(weight_format)
    weight = quantize_weight(values, kind, scale_fmt="float32" if scale_fmt == "float32" else "ue8m0")
    weight = to_fnuz(weight) if dialect == "fnuz" else weight
    moved = {
        name: tensor.to(device)
        for name in ("data", "scale", "global_scale")
        if (tensor := getattr(weight, name)) is not None
    }
    return replace(weight, **moved)


def rope_table(num_positions: int, width: int, device: str) -> RopeTable:
    """A rotary table whose pairs turn at very different speeds."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return RopeTable(cos_sin_PR=torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1).to(device))
