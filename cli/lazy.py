"""A typer group that knows its commands by name and imports one only when it runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
import typer.core
import typer.main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halocline.cli.commands import Command

__all__ = ["LazyGroup", "load"]


class LazyGroup(typer.core.TyperGroup):
    """The top-level group: help and completion read the table, running a command imports its file.

    typer hands a context of its own private class to these methods, hence ``Any``.
    """

    _targets: dict[str, Command]

    def add_table(self, table: Sequence[Command]) -> None:
        """Registers a stub for each line of the table, enough for help, suggestions and completion."""
        self._targets = {command.name: command for command in table}
        for command in table:
            self.add_command(typer.core.TyperCommand(command.name, short_help=command.help, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Finds the command that is about to run and replaces its stub with the real one."""
        name, stub, rest = super().resolve_command(ctx, args)
        if name is None or stub is None:
            return name, stub, rest
        command = load(self._targets[name])
        _add_params(command, [param for param in self.params if param.name == "verbose"])
        return name, command, rest


def load(command: Command) -> Any:
    """Imports a command's file and builds the typer command from its target."""
    module_name, _, attribute = command.target.partition(":")
    target = getattr(import_module(module_name), attribute)
    if isinstance(target, typer.Typer):
        target.rich_markup_mode = None
        built: Any = typer.main.get_group(target)
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(command.name)(target)
        built = typer.main.get_command(app)
    built.name = command.name
    return built


def _add_params(command: Any, params: list[Any]) -> None:
    """Gives the top-level options to a command and all its sub-commands: `-v` works before and after the name."""
    taken = {option for param in command.params for option in param.opts}
    command.params.extend(param for param in params if taken.isdisjoint(param.opts))
    for child in getattr(command, "commands", {}).values():
        _add_params(child, params)
