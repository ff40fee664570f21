"""Every error that Halocline raises on purpose.

Two roots matter to callers: `InputError` (a `ValueError`: what the caller asked for is wrong or impossible)
and `MachineError` (a `RuntimeError`: the machine lacks or lost something). The command line turns `exit_code`
into its status. A message says what was asked, what was found and what to do; `lines` builds it.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "HaloclineError",
    "InputError",
    "KernelImportError",
    "MachineError",
    "NoKernelError",
    "OutOfPagesError",
    "OverrideError",
    "RequestError",
    "SettingsError",
    "ShapeError",
    "lines",
]


class HaloclineError(Exception):
    """Root of all errors of this package.

    Attributes:
        exit_code: Status with which the command line ends: 1 failed, 2 asked for something impossible.
    """

    exit_code = 1


class InputError(HaloclineError, ValueError):
    """The caller asked for something wrong or impossible."""

    exit_code = 2


class MachineError(HaloclineError, RuntimeError):
    """The machine lacks something, or something broke while running."""

    exit_code = 1


class ConfigError(InputError):
    """A model configuration is unreadable, incomplete or impossible."""


class CheckpointError(InputError):
    """A checkpoint's files, index and configuration do not agree."""


class SettingsError(InputError):
    """A setting or environment variable is unknown, malformed or in conflict with another."""


class OverrideError(InputError):
    """A kernel override names an unknown op, kernel, device or trait."""


class RequestError(InputError):
    """A generation request is out of bounds: token ids, lengths or sampling parameters."""


class ShapeError(InputError):
    """A tensor handed to a kernel differs from what its contract and plan state."""


class NoKernelError(InputError):
    """No kernel covers a requested op on this device, or an explicit choice cannot be honoured."""


class KernelImportError(MachineError):
    """A chosen kernel's library failed to import; the original exception is chained."""

    exit_code = 2


class DeviceError(MachineError):
    """No usable device, or torch was built for another vendor than the device that is there."""

    exit_code = 2


class OutOfPagesError(MachineError):
    """The cache cannot hold what was asked, with the numbers in the message."""

    exit_code = 2


def lines(summary: str, **facts: object) -> str:
    """Builds a message of one summary line and one aligned line per fact.

    Args:
        summary: What went wrong, in one line.
        **facts: Label and text of each further line, in order; `None` drops a line, `try_` prints as `try`.

    Returns:
        The message, lines joined by newlines.
    """
    kept = {label.rstrip("_"): str(text) for label, text in facts.items() if text is not None}
    width = max((len(label) for label in kept), default=0)
    return "\n".join([summary, *(f"  {label.ljust(width)}  {text}" for label, text in kept.items())])
