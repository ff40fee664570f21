"""What judges of a GPU session's rows share: lines, verdicts, and how rows are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Criterion", "Row", "Verdict", "find", "find_errors", "kernel_of", "latest", "left_out"]

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the rows say of a line.

    Attributes:
        line: The line.
        passed: Whether it holds; None if its rows are missing.
        said: The figures, in words.
    """

    line: str
    passed: bool | None
    said: str


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A line and its judge, which gets the rows and returns whether it holds and the figures."""

    line: str
    judge: Callable[[Sequence[Row]], tuple[bool | None, str]]


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each name and parameters: a part that ran again replaces what it said before.

    What came to a good end says so by a row of its seconds; an earlier failure of the same is forgotten then.
    """
    kept: dict[tuple[str, str, bool], Row] = {}
    for row in rows:
        asked = str(sorted((key, value) for key, value in row["params"].items() if key not in _SAID))
        if row["name"].endswith(".seconds"):
            kept.pop((row["name"].removesuffix(".seconds"), asked, True), None)
        kept[row["name"], asked, row["unit"] == "error"] = row
    return list(kept.values())


# Parameters that say what came out, not what was asked.
_SAID = ("said", "first", "apart", "lessons", "failed", "finite", "compared", "GiB", "planned", "unbound", "GB", "left")


def find(rows: Sequence[Row], name: str, **params: Any) -> list[Row]:
    """Rows of a name and these parameters, errors left out."""
    return [
        row
        for row in rows
        if row["name"] == name
        and row["unit"] != "error"
        and all(row["params"].get(key) == value for key, value in params.items())
    ]


def find_errors(rows: Sequence[Row], *names: str, **params: Any) -> list[Row]:
    """Rows of failures under any of these names and with these parameters."""
    return [
        row
        for row in rows
        if row["name"] in names
        and row["unit"] == "error"
        and all(row["params"].get(key) == value for key, value in params.items())
    ]


def kernel_of(row: Row) -> str:
    """The kernel that a row is about, as an override names it."""
    return f"{row['params']['op']}={row['params']['kernel']}"


def left_out(rows: Sequence[Row], *names: str) -> list[str]:
    """Kernels that rows of these names say one process could not show."""
    return list(dict.fromkeys(kernel_of(row) for name in names for row in find(rows, name)))
