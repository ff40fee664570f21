"""Row counts for which a library compiles its products, so that there are few of them.

DeepGEMM chooses tiles, stages and even the number of programs by the number of rows, and compiles each choice on first
use, with a compiler that takes seconds. Rows come in any number. So products are made of runs of a few sizes, of which
the last run's rows are padded up: up to 256 rows cost little more than fewer do, as the bytes of the matrix bound them,
and beyond, no more than an eighth of all rows is padding. A warm-up whose steps have each of these sizes, and the most
tokens that there can be, meets every run of every smaller step.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RowRun", "row_runs"]

_SIZES = (16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
_FREELY_PADDED = 256


class RowRun(NamedTuple):
    """Consecutive rows of a product.

    Attributes:
        start: First row.
        num_rows: Rows.
        padded: Rows that are computed, one of a few sizes; those behind those are anything.
    """

    start: int
    num_rows: int
    padded: int


def row_runs(num_rows: int) -> tuple[RowRun, ...]:
    """The runs of so many rows, one after the other; only the last one is padded.

    Args:
        num_rows: Rows of a product.
    """
    runs: list[RowRun] = []
    start = 0
    while start < num_rows:
        rest = num_rows - start
        above = next((size for size in _SIZES if size >= rest), None)
        if above is not None and (rest <= _FREELY_PADDED or above - rest <= num_rows // 8):
            runs.append(RowRun(start, rest, above))
            break
        below = max(size for size in _SIZES if size <= rest)
        runs.append(RowRun(start, below, below))
        start += below
    return tuple(runs)
