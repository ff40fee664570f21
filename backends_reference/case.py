"""Case: one input of an op, as a small program over bound kernels.

A case builds its inputs from a seed on the CPU, moves them to the device, calls the op through the `Ops` it is given
(its own allocations and load-time conversions included, so that each kernel sees its own layouts) and returns what
must agree. Parity runs one case with the reference on the CPU and with a candidate on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["Case", "generator", "normal"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input of one op.

    Attributes:
        op: `family.op`.
        name: What is special about it, for example `ragged` or `empty`.
        dtype: Key of the op's tolerance: `float32` or `bfloat16`.
        run: Takes the kernels and a device name; returns named outputs, whose defined elements must agree.
        formats: Formats that a kernel must take to be asked, for example `{"weight": "mxfp4"}`.
    """

    op: str
    name: str
    dtype: str
    run: Callable[[Ops, str], Mapping[str, Tensor]]
    formats: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.dtype}"


def generator(seed: int) -> torch.Generator:
    """A CPU generator, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(seed)


def normal(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal numbers of an element type."""
    return (torch.randn(*shape, generator=gen) * std).to(dtype)
