"""``halocline plan-weights``: what a configuration's checkpoint holds. Loads no torch and no numpy."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halocline.models.weight_plan import WeightPlan

__all__ = ["plan_weights"]


def plan_weights(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A config.json, or a folder that holds one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every tensor as JSON.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="With --json: totals only.")] = False,
    list_all: Annotated[bool, typer.Option("--all", help="List every tensor.")] = False,
) -> None:
    """List the tensors of a checkpoint from its configuration alone: names, shapes, types, bytes, splits.

    No weight file is opened, so it also answers for a checkpoint that is not here.
    """
    from halocline.models.registry import load_config

    parsed, family = load_config(config)
    plan = family.plan_weights(parsed)
    if as_json:
        typer.echo(json.dumps(_as_dict(plan, family.model_type, with_tensors=not summary), indent=2))
        return
    if list_all and not summary:
        for entry in plan.tensors:
            shape = "x".join(map(str, entry.shape)) or "scalar"
            typer.echo(f"{entry.name}  {shape}  {entry.dtype.value}  {entry.nbytes}  {entry.shard}")
    _print_summary(plan)


def _groups(plan: WeightPlan) -> dict[str, tuple[int, int]]:
    """Tensors and bytes of each group, in the order of the plan."""
    counts, sizes = Counter[str](), Counter[str]()
    for entry in plan.tensors:
        counts[entry.group] += 1
        sizes[entry.group] += entry.nbytes
    return {group: (counts[group], sizes[group]) for group in counts}


def _as_dict(plan: WeightPlan, model_type: str, *, with_tensors: bool) -> dict[str, object]:
    out: dict[str, object] = {
        "model_type": model_type,
        "num_tensors": plan.num_tensors,
        "nbytes": plan.nbytes,
        "num_elements": plan.num_elements,
        "groups": {group: {"num_tensors": n, "nbytes": size} for group, (n, size) in _groups(plan).items()},
    }
    if with_tensors:
        out["tensors"] = [
            {
                "name": entry.name,
                "shape": list(entry.shape),
                "dtype": entry.dtype.value,
                "nbytes": entry.nbytes,
                "shard": {"axis": entry.shard.axis, "unit": entry.shard.unit or None, "expert": entry.shard.expert},
            }
            for entry in plan.tensors
        ]
    return out


def _print_summary(plan: WeightPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("part")
    for title in ("tensors", "bytes"):
        table.add_column(title, justify="right")
    for group, (count, size) in _groups(plan).items():
        table.add_row(group, f"{count:,}", f"{size:,}")
    table.add_row("total", f"{plan.num_tensors:,}", f"{plan.nbytes:,}")
    Console(markup=False, highlight=False).print(table)
