"""Inputs of the collectives for a group of one process. T tokens, D lanes.

Groups of several processes need several processes; tests start them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from halocline.backends_reference.case import DTYPES, Case, call, generator, normal
from halocline.hal.process_group import ALONE

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]


def cases() -> Iterator[Case]:
    """Rows of hidden states, one row, no row."""
    for op in ("all_gather", "all_reduce", "all_to_all", "broadcast"):
        for dtype in DTYPES:
            for name, rows in (("one", 1), ("ragged", 33), ("empty", 0)):
                yield _case(op, name, dtype, rows)


def _case(op: str, name: str, dtype: str, rows: int) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        x_TD = normal(generator(rows), rows, 64, dtype=DTYPES[dtype]).to(device)
        counts = ([rows], [rows]) if op == "all_to_all" else ()
        return call(ops, f"collective.{op}", x_TD, *counts, ALONE)

    traits: dict[str, int | str] = {"world_size": 1}
    return Case(op=f"collective.{op}", name=name, dtype=dtype, run=run, formats={"compute": dtype}, traits=traits)
