"""RankLauncher: starts one process for each rank on this machine, and ends all when one is lost. Loads no torch.

Rank 0 stays in the terminal's process group and keeps its input; the others have groups of their own, so that Ctrl-C
reaches rank 0 alone, which then lets them go. The kernel ends every rank when the launcher ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from halocline.engine.ranks.processes import end_with_parent
from halocline.hal.place import RankPlace
from halocline.hal.settings import child_environment

__all__ = ["launch_ranks"]

_LAST_WORDS_SECONDS = 2.0
_END_SECONDS = 10.0


def launch_ranks(arguments: Sequence[str], world: int, *, module: str = "halocline") -> int:
    """Runs the same command once for each rank and waits for their end.

    Args:
        arguments: Of the command line, without the program's name.
        world: Number of ranks.
        module: What Python runs.

    Returns:
        Exit status: that of rank 0, or not 0 if any rank was lost.
    """
    ranks = _Ranks(world)
    with ranks.forwarding_signals():
        try:
            ranks.start([sys.executable, "-m", module, *arguments])
            return ranks.wait()
        finally:
            ranks.kill()


class _Ranks:
    """The processes."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._processes: list[subprocess.Popen[bytes]] = []
        self._signalled = False

    def start(self, command: Sequence[str]) -> None:
        port, parent = _free_port(), os.getpid()
        defaults = {
            "GLOO_SOCKET_IFNAME": "lo",  # all ranks are here
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self._world)),
        }
        for rank in range(self._world):
            place = RankPlace(
                rank=rank,
                world=self._world,
                local_rank=rank,
                local_world=self._world,
                address="127.0.0.1",
                port=port,
            )
            process = subprocess.Popen(
                command,
                env=child_environment(place, defaults),
                stdin=None if rank == 0 else subprocess.DEVNULL,
                process_group=None if rank == 0 else 0,
                preexec_fn=lambda: end_with_parent(parent),  # noqa: PLW1509 - this process has one thread
            )
            self._processes.append(process)

    def wait(self) -> int:
        """Waits for rank 0, or for the first rank that is lost."""
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            assert found is not None
            rank = next((i for i, process in enumerate(self._processes) if process.pid == found.si_pid), None)
            if rank is None:
                os.waitpid(found.si_pid, 0)
                continue
            if found.si_code == os.CLD_STOPPED:
                return self._lost(rank, "was stopped")
            status = self._processes[rank].wait()
            if status < 0 and self._signalled and rank == 0:
                return 128 - status
            if status < 0:
                return self._lost(rank, f"was ended by {signal.Signals(-status).name}")
            if status != 0:
                self._wait_for_rest(_LAST_WORDS_SECONDS)  # who failed first is telling why
                return status if 0 < status < 128 else 1
            if rank == 0:
                return 0 if self._wait_for_rest(_END_SECONDS) else 1

    def _lost(self, rank: int, how: str) -> int:
        sys.stderr.write(f"rank {rank} (process {self._processes[rank].pid}) {how}; all {self._world} ranks end\n")
        return 1

    def _wait_for_rest(self, seconds: float) -> bool:
        """Gives the others time to end by themselves; whether all did so in good order."""
        end = time.monotonic() + seconds
        statuses = []
        for process in self._processes:
            try:
                statuses.append(process.wait(max(end - time.monotonic(), 0.01)))
            except subprocess.TimeoutExpired:
                statuses.append(1)
        return not any(statuses)

    def kill(self) -> None:
        """Ends whatever is left."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Hands SIGTERM on to rank 0, which winds down; SIGINT reaches it through the terminal."""

        def forward(number: int, _: FrameType | None) -> None:
            self._signalled = True
            if self._processes and self._processes[0].poll() is None:
                self._processes[0].send_signal(number)

        handlers = {signal.SIGTERM: forward, signal.SIGHUP: forward, signal.SIGINT: lambda *_: None}
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def _free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
