"""What a part's log says while a program works: its lines with the second at which they came, and kernels compiled.

A part that is ended late has its log alone to tell where it stood.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from halocline.benchmarks.jit_watch import cache_folders
from halocline.hal.settings import process_settings

__all__ = ["kernels_kept", "run_and_show", "telling_of_kernels"]

_SECONDS = 5.0


def kernels_kept(folders: Sequence[Path]) -> dict[str, int]:
    """Files in each folder of compiled kernels, by the folder's name."""
    return {folder.name: sum(len(files) for _, _, files in os.walk(folder)) for folder in folders}


@contextmanager
def telling_of_kernels(every: float = _SECONDS) -> Iterator[None]:
    """Writes to the log how the folders of compiled kernels grow, whatever program fills them."""
    folders = cache_folders(process_settings())
    ended, begun, before = threading.Event(), time.monotonic(), kernels_kept(folders)

    def tell() -> None:
        last = before
        while not ended.wait(every):
            found = kernels_kept(folders)
            if found != last:
                said = ", ".join(f"{name} {count}" for name, count in found.items())
                _show(begun, f"files of compiled kernels: {said}")
                last = found

    teller = threading.Thread(target=tell, name="kernels-kept", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def run_and_show(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a program, its messages going to the log as they come; returns them and what it printed."""
    begun, said = time.monotonic(), list[str]()
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        with subprocess.Popen(command, stdout=printed, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    said.append(line)
                    _show(begun, line.rstrip())
            except BaseException:  # a part that is ended does not wait for its program
                process.kill()
                raise
        printed.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, printed.read(), "".join(said))


def _show(begun: float, line: str) -> None:
    sys.stdout.write(f"{time.monotonic() - begun:7.1f} {line}\n")
    sys.stdout.flush()
