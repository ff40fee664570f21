"""The shell around the commands: the table, global options, errors and exit statuses."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import typer

from halocline.cli import commands, main
from halocline.cli.commands import COMMANDS, Command
from halocline.hal.errors import HaloclineError, InputError, MachineError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """The commands configure the process's logging; put it back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    ours = logging.getLogger("halocline").level
    yield
    root.handlers[:], root.level = handlers, level
    logging.getLogger("halocline").setLevel(ours)
    logging.captureWarnings(False)


def run(*arguments: str) -> int:
    """Runs the command line in this process and gives its exit status."""
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    return int(stop.value.code or 0)


# ---- the table --------------------------------------------------------------------------------------------------


def test_names_are_unique_and_help_is_one_line() -> None:
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
    assert [c.name for c in COMMANDS if "\n" in c.help or not c.help.endswith(".") or len(c.help) > 62] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_target_of_each_line_exists_and_is_documented(command: Command) -> None:
    module, _, attribute = command.target.partition(":")
    target = getattr(import_module(module), attribute)
    assert isinstance(target, typer.Typer) or inspect.getdoc(target)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_of_each_command_names_it_and_takes_verbose(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.name, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: halocline {command.name}")
    assert "--verbose" in text


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [command.name for command in COMMANDS if f"{command.name} {command.help}" not in text] == []


# ---- global options ---------------------------------------------------------------------------------------------


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    import halocline

    assert run("--version") == 0
    assert capsys.readouterr().out == f"halocline {halocline.__version__}\n"


def test_module_and_console_script_are_the_same_program() -> None:
    result = subprocess.run([sys.executable, "-m", "halocline", "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("Usage: halocline ")


def test_unknown_command_names_the_nearest_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("envv") == 2
    assert "Did you mean 'env'?" in capsys.readouterr().err


def test_unknown_option_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env", "--jsn") == 2
    assert "--json" in capsys.readouterr().err


def _probe(monkeypatch: pytest.MonkeyPatch, target: object) -> None:
    """Replaces the table by one command whose function is `target`."""
    monkeypatch.setattr(commands, "probe", target, raising=False)
    monkeypatch.setattr(main, "COMMANDS", (Command("probe", "halocline.cli.commands:probe", "Probe."),))


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["probe"], logging.INFO),
        (["-v", "probe"], logging.DEBUG),
        (["probe", "-v"], logging.DEBUG),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_verbose_works_before_and_after_the_command(
    arguments: list[str], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def probe() -> None:
        seen.append(logging.getLogger("halocline").level)

    _probe(monkeypatch, probe)
    assert run(*arguments) == 0
    assert seen == [level]


def test_verbose_reaches_sub_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    group = typer.Typer()

    @group.command()
    def one() -> None:
        seen.append(logging.getLogger("halocline").level)

    @group.command()
    def two() -> None:
        raise AssertionError("not asked for")

    _probe(monkeypatch, group)
    assert run("probe", "one", "-v") == 0
    assert seen == [logging.DEBUG]


# ---- statuses and errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [None, 0, 1, 2])
def test_what_a_command_returns_is_the_exit_status(status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> int | None:
        return status

    _probe(monkeypatch, probe)
    assert run("probe") == (status or 0)


@pytest.mark.parametrize("kind", [InputError, MachineError])
def test_an_error_of_ours_becomes_a_message_and_its_status(
    kind: type[HaloclineError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe() -> None:
        raise kind("no water\n  found  sand")

    _probe(monkeypatch, probe)
    assert run("probe") == kind.exit_code
    captured = capsys.readouterr()
    assert captured.err == f"{kind.__name__}: no water\n  found  sand\n"
    assert captured.out == ""


def test_twice_verbose_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise InputError("no water")

    _probe(monkeypatch, probe)
    with pytest.raises(InputError, match="no water"):
        main.main(["probe", "-vv"])


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise KeyError("slot")

    _probe(monkeypatch, probe)
    with pytest.raises(KeyError, match="slot"):
        main.main(["probe"])


# ---- env --------------------------------------------------------------------------------------------------------


def _halocline(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Settings are read once per process, so each environment needs a process of its own."""
    import os

    command = [sys.executable, "-m", "halocline", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def test_env_prints_each_setting_with_value_and_source() -> None:
    result = _halocline("env", "--json", HALOCLINE_HIP_BACKEND="triton")
    assert result.returncode == 0, result.stderr
    rows = {row["variable"]: row for row in json.loads(result.stdout)["settings"]}
    assert (rows["HALOCLINE_HIP_BACKEND"]["value"], rows["HALOCLINE_HIP_BACKEND"]["source"]) == (
        "triton",
        "environment",
    )
    assert rows["HALOCLINE_PREFILL_LAYOUT"]["source"] == "default"


def test_env_as_a_table_fits_80_columns_and_names_every_setting() -> None:
    table = _halocline("env", COLUMNS="80")
    names = [row["variable"] for row in json.loads(_halocline("env", "--json").stdout)["settings"]]
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    assert [name for name in names if name not in table.stdout] == []


def test_a_mistyped_setting_stops_every_command_and_names_the_nearest() -> None:
    result = _halocline("env", HALOCLINE_HIP_BACKENT="triton")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("SettingsError: unknown setting HALOCLINE_HIP_BACKENT\n")
    assert "rename it to HALOCLINE_HIP_BACKEND" in result.stderr
