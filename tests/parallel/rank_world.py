"""Processes that stay up for a whole run and play the ranks of one world after the other, over gloo.

Starting a process with torch takes seconds, opening a world of running ones takes a moment. A task is a function
`module:name` of this folder; every rank calls it with its rank, and returns what pickle can carry.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

__all__ = ["RankError", "RankWorld"]

_START_SECONDS = 120
_TASK_SECONDS = 240


class RankError(Exception):
    """What a rank raised, by rank: `errors[1]` is `(type name, message, traceback)`."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in errors.items()))
        self.errors = errors


class RankWorld:
    """The running processes. `run` sends a task to the first few of them and collects what they return."""

    def __init__(self, size: int, folder: Path) -> None:
        self._folder = folder
        self._num_worlds = 0
        self._address = str(folder / "ranks")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with Listener(self._address, "AF_UNIX") as listener:
            command = [sys.executable, __file__, self._address]
            self._processes = [subprocess.Popen(command, env=environment) for _ in range(size)]
            listener._listener._socket.settimeout(_START_SECONDS)  # type: ignore[attr-defined]
            self._connections: list[Connection[Any, Any]] = [listener.accept() for _ in range(size)]

    def run(self, world: int, task: str, **arguments: Any) -> list[Any]:
        """What each rank of a world of this size returns, in rank order.

        Raises:
            RankError: If a rank raised.
        """
        self._num_worlds += 1
        store = f"file://{self._folder}/store-{self._num_worlds}"
        for rank, connection in enumerate(self._connections[:world]):
            connection.send_bytes(pickle.dumps((rank, world, store, task, arguments)))
        results: list[Any] = []
        errors: dict[int, tuple[str, str, str]] = {}
        for rank, connection in enumerate(self._connections[:world]):
            if not connection.poll(_TASK_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} of {world} did not answer {task}; others said {errors}")
            ok, value = pickle.loads(connection.recv_bytes())
            results.append(value)
            if not ok:
                errors[rank] = value
        for connection in self._connections[:world]:
            connection.send_bytes(b"all have answered")
        if errors:
            raise RankError(errors)
        return results

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()


def _serve(address: str) -> None:
    """The life of a rank's process: tasks in, results out, until the other end closes."""
    import importlib

    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    with Client(address, "AF_UNIX") as connection:
        while True:
            try:
                rank, world, store, task, arguments = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                return
            module, _, name = task.partition(":")
            try:
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
                answer: Any = (True, getattr(importlib.import_module(module), name)(rank, **arguments))
            except Exception as error:  # whatever it was, the test sees it
                answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
            connection.send_bytes(pickle.dumps(answer))
            connection.recv_bytes()  # a rank that leaves early would break connections that others still open
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    _serve(sys.argv[1])
