"""``halocline doctor``: what is wrong with this machine. Loads no torch and no kernel library into its own process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halocline.hal.doctor import Report

__all__ = ["doctor"]

_MARKS = {"ok": "ok", "remark": "note", "fault": "FAULT"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Check device, torch, kernel packages and cache folders of this machine.

    Exits with 0 when all is well for the device found, with 1 when something is wrong.
    """
    from halocline.hal.backend import load_manifests, specs_of
    from halocline.hal.doctor import diagnose
    from halocline.hal.settings import process_settings

    report = diagnose(process_settings(), specs_of(load_manifests()))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    return 0 if report.healthy else 1


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table("check", "", "found", box=None, padding=(0, 2, 0, 0))
    for check in report.checks:
        found = f"{check.found}; {check.remedy}" if check.remedy else check.found
        table.add_row(check.name, _MARKS[check.state], found)
    console.print(table)
    faults = sum(check.state == "fault" for check in report.checks)
    console.print(f"{faults} faults" if faults else f"healthy: {report.device}")
