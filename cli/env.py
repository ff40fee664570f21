"""``halocline env``: every setting, its value and where that comes from. Loads the standard library, typer and rich."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from halocline.hal.settings import process_settings

__all__ = ["env"]


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the settings, and where each value comes from.

    A setting is a variable HALOCLINE_NAME in the environment. An empty value means unset; a variable of that prefix
    which is not in this list stops every command.
    """
    settings = process_settings()
    if as_json:
        rows = [dataclasses.asdict(row) for row in settings.rows()]
        typer.echo(json.dumps({"settings": rows, "foreign": dict(settings.foreign)}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", "what it does", box=None, padding=(0, 2, 0, 0))
    for row in settings.rows():
        table.add_row(row.variable, row.value or "-", row.source, row.help)
    Console(markup=False, highlight=False).print(table)
