"""What judges of a GPU session's rows share: lines, verdicts, and how rows are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Criterion",
    "Judge",
    "Row",
    "Verdict",
    "find",
    "find_errors",
    "judge_server",
    "kernel_of",
    "latest",
    "left_out",
]

Row = dict[str, Any]
Judge = Callable[[Sequence[Row]], tuple[bool | None, str]]


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
    judge: Judge


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


def judge_server(part: str, least_layers: int) -> Judge:
    """Whether a server of so many layers answered and left nobody behind; `part` is the name of its rows."""

    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        found, broken = find(rows, f"{part}.ready"), find_errors(rows, part)
        if not found:
            return (False, str(broken[-1]["value"])[:120]) if broken else (None, "")
        ended, rates = find(rows, f"{part}.ended"), find(rows, f"{part}.rate")
        said = f"{found[-1]['params']['layers']} layers ready in {found[-1]['value']} s"
        said += "".join(f"; {row['params']['at_once']} at once: {row['value']} tokens/s" for row in rates)
        drained = bool(ended) and ended[-1]["value"]["status"] == 0 and not ended[-1]["params"]["left"]
        deep = found[-1]["params"]["layers"] >= least_layers
        return drained and bool(rates) and deep and not broken, f"{said}; drained with nobody left: {drained}"

    return judge
