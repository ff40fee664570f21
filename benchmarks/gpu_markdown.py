"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["table", "trace_table"]


def table(heads: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A table; nothing when there is no row."""
    if not body:
        return ""
    rows = [[str(cell) for cell in row] for row in (heads, ["---"] * len(heads), *body)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def trace_table(row: Mapping[str, Any]) -> str:
    """Kernels of a step with their time and launches."""
    body = [(f"`{name[:70]}`", us, count) for name, (us, count) in row["value"].items()]
    return table(("kernel", "us", "launches"), body)
