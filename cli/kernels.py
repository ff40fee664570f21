"""``halocline kernels``: the kernels of every backend as a list, and what serves each op on each device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="List the kernels, or what serves each op on each device.", no_args_is_help=True)

_MARKS = {"run": "", "not_run": "*", "planned": "+", None: ""}


@app.command("list")
def list_kernels(
    op: Annotated[str | None, typer.Option(help="Only kernels of this op or family.")] = None,
    device: Annotated[str | None, typer.Option(help="Rank and status on this recorded device.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every kernel of every backend: status run, not_run (written, never executed there) or planned."""
    from halocline.hal.backend import load_manifests, specs_of
    from halocline.hal.explain import kernel_rows
    from halocline.hal.profiles import profile

    arch = None if device is None else profile(device).device.arch
    rows = kernel_rows(specs_of(load_manifests()), arch=arch)
    if op is not None:
        rows = [row for row in rows if row["op"] == op or row["op"].startswith(f"{op}.")]
    if as_json:
        typer.echo(json.dumps({"kernels": rows}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("op", "kernel", "vendor", "rank", "status", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(row["op"], row["kernel"], row["vendor"], _by_arch(row["rank"]), _by_arch(row["status"]))
    Console(markup=False, highlight=False).print(table)


@app.command()
def matrix(
    model: Annotated[str, typer.Option(help="A released model's name, or a folder with a config.json.")] = "flash",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show which kernel serves each op on each recorded device (* never run there, + still to come)."""
    from halocline.hal.profiles import PROFILES
    from halocline.models.explain import explain

    cells: dict[str, dict[str, dict[str, str | None]]] = {}
    for name in PROFILES:
        for row in explain(model, device=name).rows():
            cells.setdefault(row["op"], {}).setdefault(name, {"kernel": row["chosen"], "status": row["status"]})
    if as_json:
        typer.echo(json.dumps({"model": model, "ops": cells}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    names = list(PROFILES)
    for part in (names[:4], names[4:]):
        table = Table("op", *part, box=None, padding=(0, 1, 0, 0))
        for op, by_device in cells.items():
            table.add_row(op, *(_cell(by_device[name]) for name in part))
        console.print(table)
        console.print()
    console.print("* written, never run there   + still to come")


def _cell(cell: dict[str, str | None]) -> str:
    return f"{cell['kernel']}{_MARKS[cell['status']]}" if cell["kernel"] else "-"


def _by_arch(value: object) -> str:
    return ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
