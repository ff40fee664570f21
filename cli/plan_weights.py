"""``halocline plan-weights``: what a configuration's checkpoint holds. Loads no torch and no numpy."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halocline.models.parallel import ParallelSizes
    from halocline.models.weight_plan import WeightPlan

__all__ = ["plan_weights"]


def plan_weights(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A config.json, or a folder that holds one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every tensor as JSON.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="With --json: totals only.")] = False,
    list_all: Annotated[bool, typer.Option("--all", help="List every tensor.")] = False,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the heads.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Attention groups, each with its own requests.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks over which whole experts are spread.")] = 1,
) -> None:
    """List the tensors of a checkpoint from its configuration alone: names, shapes, types, bytes, splits.

    No weight file is opened, so it also answers for a checkpoint that is not here. With --tp, --dp or --ep it says what
    each rank holds.
    """
    from halocline.models.parallel import ParallelSizes
    from halocline.models.registry import load_config

    parsed, family = load_config(config)
    plan = family.plan_weights(parsed)
    sizes = ParallelSizes(tp=tp, dp=dp, ep=ep)
    family.check_sizes(parsed, sizes)
    ranks = _ranks(plan, sizes) if sizes.world > 1 else []
    if as_json:
        report = _as_dict(plan, family.model_type, with_tensors=not summary)
        if ranks:
            report["ranks"] = [
                {"ranks": list(held.ranks), "nbytes": held.nbytes, "groups": held.groups} for held in ranks
            ]
        typer.echo(json.dumps(report, indent=2))
        return
    if list_all and not summary:
        for entry in plan.tensors:
            shape = "x".join(map(str, entry.shape)) or "scalar"
            typer.echo(f"{entry.name}  {shape}  {entry.dtype.value}  {entry.nbytes}  {entry.shard}")
    _print_summary(plan, ranks)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What some ranks hold, each of them: bytes by group of the plan."""

    ranks: tuple[int, ...]
    groups: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of one of these ranks."""
        return sum(self.groups.values())

    @property
    def title(self) -> str:
        """For a column."""
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) == 1:
            return f"rank {first}"
        is_run = last - first + 1 == len(self.ranks)
        return f"each of ranks {first}-{last}" if is_run else f"each of ranks {', '.join(map(str, self.ranks))}"


def _ranks(plan: WeightPlan, sizes: ParallelSizes) -> list[_Held]:
    """One entry for all ranks that hold as much."""
    from halocline.models.sharding import bytes_by_rank

    ranks: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, groups in enumerate(bytes_by_rank(plan, sizes)):
        ranks.setdefault(tuple(groups.items()), []).append(rank)
    return [_Held(ranks=tuple(same), groups=dict(groups)) for groups, same in ranks.items()]


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


def _print_summary(plan: WeightPlan, ranks: list[_Held]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("part")
    for title in ("tensors", "bytes", *(held.title for held in ranks)):
        table.add_column(title, justify="right")
    for group, (count, size) in _groups(plan).items():
        table.add_row(group, f"{count:,}", f"{size:,}", *(f"{held.groups[group]:,}" for held in ranks))
    table.add_row("total", f"{plan.num_tensors:,}", f"{plan.nbytes:,}", *(f"{held.nbytes:,}" for held in ranks))
    Console(markup=False, highlight=False).print(table)
