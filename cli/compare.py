"""``halocline compare``: two kernels of one op on its test inputs, side by side."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from halocline.hal.offline import Workbench

__all__ = ["compare", "workbench"]


def workbench() -> Workbench:
    """The kernels, device and packages of this machine."""
    from halocline.hal.backend import load_manifests, specs_of
    from halocline.hal.offline import Workbench
    from halocline.hal.probe import probe
    from halocline.hal.settings import process_settings
    from halocline.hal.startup import installed_for

    manifests = load_manifests()
    return Workbench(
        manifests=manifests, device=probe(process_settings()), inventory=installed_for(specs_of(manifests))
    )


def compare(
    op: Annotated[str, typer.Option(help="The op, as in family.op.")],
    first: Annotated[str | None, typer.Option(help="Kernel to judge; the best one when left out.")] = None,
    second: Annotated[str, typer.Option(help="Kernel to compare with.")] = "reference",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Run two kernels of an op on its test inputs and show how far they are apart.

    Exits with 1 when an output is out of the op's tolerance. Inside a run, use --kernel OP=compare(A,B).
    """
    bench = workbench()
    a, b = bench.bind(op, first), bench.bind(op, second)
    results = list(bench.compare(a, b))
    if as_json:
        rows = [
            {"case": r.case, "dtype": r.dtype, "outputs": [dataclasses.asdict(output) for output in r.outputs]}
            for r in results
        ]
        answer = {"op": op, "first": a.spec.name, "second": b.spec.name, "device": str(bench.device), "cases": rows}
        typer.echo(json.dumps(answer, indent=2))
    else:
        _print(f"{op}: {a.spec.name} against {b.spec.name} on {bench.device}", results)
    return 0 if all(result.within for result in results) else 1


def _print(title: str, results: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    console.print(title)
    table = Table("case", "output", "max abs", "max rel", "cosine", "", box=None, padding=(0, 2, 0, 0))
    for result in results:
        for output in result.outputs:
            figures = (f"{output.max_abs:.3g}", f"{output.max_rel:.3g}", f"{output.cosine:.6f}")
            name = f"{result.case} {result.dtype}"
            table.add_row(name, output.output, *figures, "" if output.within else "OUT OF TOLERANCE")
    console.print(table)
