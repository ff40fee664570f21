"""What /proc says of a process on this machine, and a process that ends with its parent. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halocline.hal.errors import MachineError

__all__ = ["ProcessMark", "end_with_parent"]

_PR_SET_PDEATHSIG = 1
_START_TIME, _STATE = 19, 0  # fields of /proc/PID/stat behind the name in brackets

ProcessState = Literal["running", "stopped", "gone"]


@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """A process, told apart from a later one with the same number by its start time.

    Attributes:
        pid: Its number.
        started: Clock ticks after boot.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessMark:
        """This process."""
        return cls(pid=os.getpid(), started=int(_stat(os.getpid())[_START_TIME]))

    def state(self) -> ProcessState:
        """Whether it runs, was stopped by a signal, or has ended."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return "gone"
        if int(fields[_START_TIME]) != self.started or fields[_STATE] in "ZX":
            return "gone"
        return "stopped" if fields[_STATE] in "Tt" else "running"

    def kill(self) -> None:
        """Ends it at once, if it is still the same process."""
        if self.state() != "gone":
            os.kill(self.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def end_with_parent(parent: int) -> None:
    """Lets the kernel end this process when its parent ends, however that happens.

    Args:
        parent: Process number that the parent is expected to have; if it is another one already, the parent is gone.

    Raises:
        MachineError: If the parent has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise MachineError("the process that started this one has ended")
