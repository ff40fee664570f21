"""The console script ``halocline``: global options, logging, and one place where errors become exit statuses.

Start-up is part of the product: ``halocline --help`` loads neither torch nor numpy nor any kernel library. The
commands themselves are listed in `halocline.cli.commands` and live in one file each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, cast

import typer
import typer.main

from halocline import __version__
from halocline.cli.commands import COMMANDS
from halocline.cli.lazy import LazyGroup
from halocline.hal.errors import HaloclineError, SettingsError
from halocline.hal.logs import configure
from halocline.hal.settings import process_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Invocation", "main"]

_VERBOSITY_WITH_TRACEBACK = 2


@dataclass
class Invocation:
    """What one call of the command line said.

    Attributes:
        arguments: All of them, without the program's name, for commands that start it again in further processes.
        verbosity: What -v said.
    """

    arguments: list[str] = field(default_factory=list)
    verbosity: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 fine, 1 failed, 2 asked for something impossible.

    Args:
        arguments: The command line without the program's name; `sys.argv` when None.

    Raises:
        SystemExit: Always.
    """
    invocation = Invocation(arguments=list(sys.argv[1:] if arguments is None else arguments))
    try:
        _build().main(args=arguments, prog_name="halocline", obj=invocation)
    except HaloclineError as error:
        if invocation.verbosity >= _VERBOSITY_WITH_TRACEBACK:
            raise
        sys.stderr.write(f"{_who()}{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)


def _who() -> str:
    """Names this process if it is one of several and not the first."""
    try:
        place = process_settings().place()
    except SettingsError:
        return ""
    return f"rank {place.rank}: " if place is not None and place.rank else ""


def _build() -> LazyGroup:
    """Builds the top-level group from the table of commands."""
    app = typer.Typer(
        cls=LazyGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True, result_callback=_exit_with
    )
    app.callback()(_global_options)
    group = cast(LazyGroup, typer.main.get_command(app))
    group.add_table(COMMANDS)
    return group


def _set_verbosity(ctx: typer.Context, value: int) -> int:
    """Reads the settings, which stops here if one is wrong, and configures logging.

    typer calls this once for the options before the command's name and once for those after it.
    """
    invocation = ctx.find_object(Invocation)
    if invocation is not None and not ctx.resilient_parsing:
        invocation.verbosity = max(invocation.verbosity, value)
        place = process_settings().place()
        rank = 0 if place is None else place.rank
        configure(max(invocation.verbosity, process_settings().verbosity), rank=rank)
    return value


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"halocline {__version__}")
        raise typer.Exit


def _global_options(
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            expose_value=False,
            callback=_set_verbosity,
            help="Say more: -v for details, -vv for everything, tracebacks included.",
        ),
    ] = 0,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """DeepSeek-V4 inference with the same model code on NVIDIA and AMD."""


def _exit_with(status: object) -> None:
    """Turns the int that a command returned into the exit status."""
    if isinstance(status, int) and status:
        raise typer.Exit(int(status))
