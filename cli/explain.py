"""``halocline explain``: which kernel serves each op, and why each other one does not. Loads no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from halocline.hal.explain import Explanation

__all__ = ["explain"]

_MARKS = {"run": "", "not_run": "never run here", "planned": "planned", None: "none"}


def explain(
    model: Annotated[str, typer.Option(help="A released model's name, or a folder with a config.json.")] = "flash",
    device: Annotated[str | None, typer.Option(help="A recorded device; this machine's when left out.")] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 1,
    a2a: Annotated[str, typer.Option(help="How tokens reach the ranks that hold their experts.")] = "none",
    recipe: Annotated[str | None, typer.Option(help="Numbers: float32, recipe or served.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be given several times.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="An override, as in OP=KERNEL.")] = None,
    packages: Annotated[str | None, typer.Option(help="Installed packages: recorded, local or none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show which kernel serves each op, and every reason against each other one.

    A named device is answered from its record, so that the answer is the same on any machine.
    """
    from halocline.hal.errors import OverrideError
    from halocline.models.explain import explain as explain_model

    if packages not in (None, "recorded", "local", "none"):
        raise OverrideError(f"--packages is recorded, local or none, not {packages!r}")
    found = explain_model(
        model,
        device=device,
        tp_size=tp,
        a2a=a2a,
        recipe_name=recipe,
        packages=packages,  # type: ignore[arg-type]
        kernels=kernel or (),
        ops=op or (),
    )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    _print(found)


def _print(found: Explanation) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    rows = found.rows()
    console.print(f"{found.model} on {found.table.device}, packages: {found.packages}")
    table = Table("op", "kernel", "chosen by", "status", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        name = f"{row['op']}@{row['layers']}" if "layers" in row else row["op"]
        table.add_row(name, row["chosen"] or "-", row["source"], _MARKS[row["status"]])
    console.print(table)
    for note in found.table.notes:
        console.print(f"note: {note}")
    console.print("\nWhy not the others")
    for row in rows:
        _print_reasons(console, row, in_full=bool(found.ops), vendor=found.table.device.vendor)


def _print_reasons(console: Console, row: dict[str, Any], *, in_full: bool, vendor: str) -> None:
    """The reasons of one op; kernels for other vendors share a line unless the op was asked for by name."""
    from rich.padding import Padding

    console.print(f"{row['op']} ({row['chosen'] or 'no kernel'})")
    foreign = {r["kernel"] for r in row["rejected"] if r["stage"] == "vendor"}
    for rejection in row["rejected"]:
        if in_full or rejection["kernel"] not in foreign:
            text = f"{rejection['kernel']}  {rejection['stage']}: {rejection['reason']}"
            console.print(Padding(text, (0, 0, 0, 2), expand=False))
    if foreign and not in_full:
        console.print(Padding(f"not for {vendor}: {', '.join(sorted(foreign))}", (0, 0, 0, 2), expand=False))
