"""The table of commands: name, where it lives, one line of help. Nothing here imports a command.

To add a command, write ``cli/<name>.py`` with one function (its parameters, annotated for typer, are the command's
options; its docstring is the help) and add one line to `COMMANDS`. For a command with sub-commands the target is a
`typer.Typer` object. The file is imported when its command runs, never before; even so, it imports torch and other
heavy modules inside its functions, so that ``halocline NAME --help`` stays quick.

A command returns None, or the exit status as an int (0 fine, 1 failed, 2 asked for something impossible). Errors of
`halocline.hal.errors` may pass through: `halocline.cli.main` turns them into a message and an exit status.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True)
class Command:
    """One line of the table.

    Attributes:
        name: What the user types.
        target: ``package.module:attribute``, a function or a `typer.Typer`.
        help: One line for ``halocline --help``.
    """

    name: str
    target: str
    help: str


COMMANDS: tuple[Command, ...] = (
    # name, target, help: in the order in which ``halocline --help`` lists them.
    Command("demo", "halocline.cli.demo:demo", "Run the whole path on a tiny model, checked."),
    Command("generate", "halocline.cli.generate:generate", "Continue a text, or answer one turn of a chat."),
    Command("chat", "halocline.cli.chat:chat", "Talk with a model in the terminal."),
    Command("serve", "halocline.cli.serve:serve", "Serve a model to OpenAI's and Anthropic's clients."),
    Command("bench", "halocline.cli.bench_serve:app", "Measure a running server: latency and throughput."),
    Command("eval", "halocline.cli.eval:evaluate", "Mark a model's answers to exercises, lesson by lesson."),
    Command("plan-weights", "halocline.cli.plan_weights:plan_weights", "List what a configuration's checkpoint holds."),
    Command("make-model", "halocline.cli.make_model:make_model", "Write a small random model in the release's format."),
    Command("doctor", "halocline.cli.doctor:doctor", "Check device, torch, packages and folders of this machine."),
    Command("explain", "halocline.cli.explain:explain", "Show which kernel serves each op, and why not the others."),
    Command("kernels", "halocline.cli.kernels:app", "List the kernels, or what serves each op on each device."),
    Command("parity", "halocline.cli.parity:parity", "Check every kernel that can run here against the reference."),
    Command("compare", "halocline.cli.compare:compare", "Compare two kernels of an op on its test inputs."),
    Command("record", "halocline.cli.record_replay:record", "Write inputs and outputs of ops of a run to files."),
    Command("replay", "halocline.cli.record_replay:replay", "Run recorded calls on a kernel of this machine."),
    Command("env", "halocline.cli.env:env", "List the settings, and where each value comes from."),
)
