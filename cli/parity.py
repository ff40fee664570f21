"""``halocline parity``: every kernel that can run here, on the inputs of its op, against the reference."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halocline.cli.compare import workbench

if TYPE_CHECKING:
    from rich.console import Console

    from halocline.hal.parity import Parity, ParityResult, Refused

__all__ = ["parity"]


def parity(
    op: Annotated[str | None, typer.Option(help="Only kernels of this op, as in family.op.")] = None,
    kernel: Annotated[str | None, typer.Option(help="Only kernels of this name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Check every kernel that can run here against the reference, on the inputs that ship with each op.

    Kernels that need several ranks are left out and named. Exits with 1 when a kernel fails, leaves an output unwritten
    or is out of its op's tolerance.
    """
    from halocline.hal.parity import check_parity, survey

    bench = workbench()
    able, refused = survey(bench, op=op, kernel=kernel)
    if as_json:
        checked = list(check_parity(bench, able))
        typer.echo(json.dumps(_facts(str(bench.device), checked, refused), indent=2))
    else:
        from rich.console import Console

        console = Console(markup=False, highlight=False)
        console.print(f"{len(able)} kernels on {bench.device} against the reference on the CPU")
        with console.status("") as status:
            checked = []
            for spec_op in dict.fromkeys(spec.op for spec in able):
                status.update(spec_op)
                checked += check_parity(bench, [spec for spec in able if spec.op == spec_op])
        _print(console, checked, refused)
        ops = dict.fromkeys(row.spec.op for row in refused)
        apart = [f"{spec.op}={spec.name}" for name in ops for spec in bench.for_several_ranks(name)]
        if apart:
            console.print(f"left out, needs several ranks: {', '.join(apart)}")
    return 0 if all(row.within for row in checked) else 1


def _facts(device: str, checked: list[Parity], refused: list[Refused]) -> dict[str, Any]:
    return {
        "device": device,
        "kernels": [
            {
                "op": row.spec.op,
                "kernel": row.spec.name,
                "within": row.within,
                "not_taken": row.num_not_taken,
                "refused": {result.case: result.refused for result in row.refused},
                "cases": [_result_facts(result) for result in row.results],
            }
            for row in checked
        ],
        "refused": [
            {"op": row.spec.op, "kernel": row.spec.name, "vendor": row.spec.vendor, "reasons": list(row.reasons)}
            for row in refused
        ],
    }


def _result_facts(result: ParityResult) -> dict[str, Any]:
    """One result; a figure that is no number (outputs that cannot be compared) is null, as JSON knows no infinity."""
    facts = {**dataclasses.asdict(result), "within": result.within}
    facts["outputs"] = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in facts["outputs"]
    ]
    return facts


def _print(console: Console, checked: list[Parity], refused: list[Refused]) -> None:
    from rich.table import Table

    table = Table("op", "kernel", "inputs", "refused", "not taken", "worst norm", "", box=None, padding=(0, 2, 0, 0))
    for row in checked:
        norms = [output.norm for result in row.results for output in result.outputs]
        counts = (str(len(row.results)), str(len(row.refused)), str(row.num_not_taken))
        worst = f"{max(norms):.2e}" if norms else "-"
        verdict = "" if row.within else "FAILED" if row.results else "NO INPUT SUITS IT"
        table.add_row(row.spec.op, row.spec.name, *counts, worst, verdict)
    console.print(table)
    for row in checked:
        for result in row.results:
            if not result.within:
                console.print(f"{row.spec.op}={row.spec.name} {result.case} {result.dtype}: {_fault(result)}")
    if refused:
        console.print(f"{len(refused)} kernels cannot run here; halocline parity --json gives every reason")


def _fault(result: ParityResult) -> str:
    if result.error:
        return result.error
    return "; ".join(f"{o.output} max abs {o.max_abs:.3g}, norm {o.norm:.3g}" for o in result.outputs if not o.within)
