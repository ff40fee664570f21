"""Inputs of the normalisations that stand alone. T rows, D lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import DTYPES, Case, Size, call, generator, normal

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]


def cases() -> Iterator[Case]:
    """Widths of the releases, odd widths, more axes, nothing, rows of very different sizes."""
    for dtype in DTYPES:
        yield _case("one_lane", dtype, (1, 1))
        yield _case("small", dtype, (5, 64))
        yield _case("odd_width", dtype, (33, 100))
        yield _case("streams", dtype, (3, 4, 128))
        yield _case("empty", dtype, (0, 64))
        yield _case("extremes", dtype, (9, 256), spread=True)
        yield _case("float32_gain", dtype, (2, 512), gain_dtype="float32")
        for width in (512, 1536, 4096, 7168):
            yield _case(f"width_{width}", dtype, (129, width), size="model")


def _case(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    *,
    spread: bool = False,
    gain_dtype: str = "",
    size: Size = "small",
) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(sum(shape))
        x = normal(gen, *shape)
        if spread:  # from rows that are nothing beside eps to rows whose squares nearly overflow
            x = x * torch.logspace(-30, 17, shape[0])[:, None]
            x[0] = 0.0
        weight_D = (1 + normal(gen, shape[-1], std=0.2)).to(DTYPES[gain_dtype or dtype])
        return call(ops, "norm.rms_norm", x.to(DTYPES[dtype]).to(device), weight_D.to(device), eps=1e-6)

    return Case(op="norm.rms_norm", name=name, dtype=dtype, run=run, formats={"compute": dtype}, size=size)
