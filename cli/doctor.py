"""``halocline doctor``: what is wrong with this machine. Loads no torch and no kernel library into its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halocline.hal.doctor import Report
    from halocline.hal.op import KernelSpec

__all__ = ["doctor"]

_MARKS = {"ok": "ok", "remark": "note", "fault": "FAULT"}


def doctor(
    image: Annotated[bool, typer.Option("--image", help="Check installed packages only; no device is needed.")] = False,
    constraints: Annotated[
        list[Path] | None, typer.Option(help="With --image: pins and accepted conflicts. May be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Check device, torch, kernel packages and cache folders of this machine.

    Exits with 0 when all is well for the device found, with 1 when something is wrong. `--image` is for the last step
    of an image's build: requirements, recorded pins, owners of modules, one vendor, one tool chain.
    """
    from halocline.hal.backend import load_manifests, specs_of
    from halocline.hal.doctor import diagnose
    from halocline.hal.settings import process_settings

    if constraints and not image:
        raise typer.BadParameter("it is read with --image only", param_hint="--constraints")
    specs = specs_of(load_manifests())
    report = _image_report(specs, constraints or []) if image else diagnose(process_settings(), specs)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    return 0 if report.healthy else 1


def _image_report(specs: Sequence[KernelSpec], constraints: Sequence[Path]) -> Report:
    from halocline.cli.image_checks import Constraints, compiler_version, image_checks, installed_here
    from halocline.hal.device import torch_build
    from halocline.hal.doctor import Report

    build = torch_build()
    compiler = compiler_version(build.vendor) if build and build.toolkit else None
    checks = image_checks(installed_here(), Constraints.read(constraints), specs, build, compiler)
    return Report(device=None, checks=tuple(checks))


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
    console.print(f"{faults} faults" if faults else f"healthy: {report.device or 'this image'}")
