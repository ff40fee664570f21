"""Processes that make noted calls side by side, so that libraries compile them before they are needed.

A library of this kind compiles within a call, one kernel at a time, and keeps what it compiled in a folder that all
processes share. What was made once with some version on some kind of device is not made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import pickle
import select
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from halocline.backends_cuda.noted_calls import LibraryCall
from halocline.hal.settings import process_settings

__all__ = ["LibraryBuilds"]

_MOST_PROCESSES = 8
_PROCESS_BYTES = 1 << 30  # of the device's memory, for a context and what is read and written
_START_SECONDS = 120.0
_CALL_SECONDS = 120.0  # one kernel takes up to 7 s on processors that nobody else uses


class _Process:
    """A process of `make_calls`.

    Raises:
        RuntimeError: If it does not start.
    """

    def __init__(self, device: torch.device) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from halocline.backends_cuda import make_calls as m; m.main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._ask(str(device), _START_SECONDS)
        except RuntimeError:
            self.close()
            raise

    def make(self, call: LibraryCall) -> None:
        """Has a call made.

        Raises:
            RuntimeError: If it fails; the process is of no use any more then.
        """
        self._ask(call, _CALL_SECONDS)

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Gives back its pipes, once nobody waits for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, message: Any, seconds: float) -> None:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(pickle.dumps(message))
            pipe_in.flush()
            problem = f"no answer in {seconds:.0f} s"
            if select.select([pipe_out], [], [], seconds)[0]:
                problem = pickle.load(pipe_out)
        except (OSError, EOFError) as error:
            problem = f"the process ended: {type(error).__name__}"
        if problem:
            self.kill()
            raise RuntimeError(problem)


class LibraryBuilds:
    """Calls that are being made.

    Use it as a context: leaving it drops what is not done and ends the processes.
    """

    def __init__(self, calls: list[LibraryCall], device: torch.device, *, workers: int) -> None:
        """Begins.

        Args:
            calls: From `noting`.
            device: Whose context they are made in.
            workers: Processors that may be used; half of them are, as something else compiles beside it.
        """
        self._device = device
        self._marks = {call: _mark(call, device) for call in calls}
        missing = [call for call, mark in self._marks.items() if not mark.exists()]
        self._processes: list[_Process] = []
        self._idle: list[_Process] = []
        self._failures = 0
        count = max(1, min(_MOST_PROCESSES, workers // 2, len(missing)))
        if device.type == "cuda":
            torch.cuda.empty_cache()
            count = min(count, torch.cuda.mem_get_info(device)[0] // _PROCESS_BYTES)
        self._most_failures = count
        self._pool = ThreadPoolExecutor(max(1, count))
        self.pending: dict[Future[None], str] = {self._pool.submit(self._make, call): call.name for call in missing}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._most_failures = 0  # what has not begun fails at once
        for process in self._processes:
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def _make(self, call: LibraryCall) -> None:
        if self._failures >= self._most_failures:
            raise RuntimeError("too many calls have failed")
        try:
            process = self._process()
            process.make(call)
        except RuntimeError:
            self._failures += 1
            raise
        self._idle.append(process)
        mark = self._marks[call]
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def _process(self) -> _Process:
        try:
            return self._idle.pop()
        except IndexError:
            self._processes.append(_Process(self._device))
            return self._processes[-1]


def _mark(call: LibraryCall, device: torch.device) -> Path:
    """An empty file beside what DeepGEMM keeps: the call has been made. Whoever removes the one removes the other."""
    kept = process_settings().library_caches().get("DG_JIT_CACHE_DIR", Path.home() / ".deep_gemm")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = repr((call, name, torch.__version__, _versions(call.module.partition(".")[0])))
    return kept / "made" / hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _versions(module: str) -> list[tuple[str, str]]:
    """Distributions that own a module, with their versions."""
    owners = importlib.metadata.packages_distributions().get(module, [])
    return sorted({(owner, importlib.metadata.version(owner)) for owner in owners})
