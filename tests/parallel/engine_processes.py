"""Starting ranks as an operator does: by the command's own sizes, by torchrun, or one by one with its variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "Started", "children_of", "free_port", "generate", "is_running", "start_command", "start_rank"]

SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def generate(model: Path, *, tokens: int, extra: Sequence[str] = ()) -> list[str]:
    """Arguments of a greedy generation."""
    options = {
        "--model": str(model),
        "--recipe": "float32",
        "--temperature": "0",
        "--max-new-tokens": str(tokens),
        "--cache-bytes": "60000000",
        "--max-context": "2048",
        "--prompt": "fresh above, salt below",
    }
    return ["generate", *(word for pair in options.items() for word in pair), *extra]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    Attributes:
        seconds: Since it was waited for.
        status: Exit status; negative for a signal.
        output: Standard output.
        said: Lines of standard error but progress.
    """

    seconds: float
    status: int
    output: str
    said: list[str]


class Started:
    """A process, killed at the end of the test whatever happens."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HALOCLINE_")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**clean, "OMP_NUM_THREADS": "1", **environment},
            bufsize=0,
        )

    def wait_for_output(self) -> None:
        """Returns at the first byte of output: the ranks are in the middle of their steps."""
        assert self.process.stdout is not None
        assert self.process.stdout.read(1), self.end().said

    def children(self) -> list[int]:
        """The process numbers of its children, oldest first."""
        return children_of(self.process.pid)

    def end(self) -> Ended:
        """Waits for its end."""
        start = time.monotonic()
        try:
            output, errors = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        lines = errors.decode().splitlines()
        return Ended(
            seconds=time.monotonic() - start,
            status=self.process.returncode,
            output=output.decode(errors="replace"),
            said=[line for line in lines if " INFO: " not in line],
        )

    def kill(self) -> None:
        for child in self.children() if self.process.poll() is None else []:
            os.kill(child, 9)
        self.process.kill()
        self.process.wait()


def start_command(arguments: Sequence[str], **environment: str) -> Started:
    """`halocline ARGUMENTS`, which starts its ranks by itself."""
    return Started([sys.executable, "-m", "halocline", *arguments], environment)


def start_rank(rank: int, world: int, port: int, arguments: Sequence[str], **environment: str) -> Started:
    """One rank, as any launcher would start it."""
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return Started([sys.executable, "-m", "halocline", *arguments], {**place, **environment})


def children_of(pid: int) -> list[int]:
    """The process numbers of the children of a process, whichever of its threads started them."""
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
