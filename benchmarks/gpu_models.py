"""Models that a part of a GPU session writes for commands which read one from a folder.

No disk of the machine holds the whole model; its main memory does. A machine whose memory grows as it is used must not
be filled faster than it grows, so that all writers but one stand still while little is free.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halocline.benchmarks.gpu_server import family_of
from halocline.benchmarks.roofline import totals
from halocline.models.deepseek_v4.presets import first_layers, preset

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["model_folder", "preset_name", "write_model"]

_SHARDS = 96
_SPARE = 8 << 30  # in a file system, beside the model
_MOUNT = 224 << 30  # size of the file system in memory; the same for all who ask, as one must not undo another's
_LEAST_FREE = 8 << 30  # of main memory, while several writers run
_LOOK_SECONDS = 0.05


def model_folder(options: argparse.Namespace, name: str) -> Path:
    """Where a model of this name is: in the folder that was asked for, else in main memory."""
    folder: Path = options.folder or (options.out if options.tiny else Path("/dev/shm"))
    return folder / name


def preset_name(options: argparse.Namespace) -> str:
    """The preset whose first layers are written."""
    return "vendor-tiny" if options.tiny else str(options.preset)


def write_model(rows: Rows, options: argparse.Namespace, folder: Path, asked: int, *, workers: int, part: str) -> int:
    """Has `halocline make-model` write a model; returns its layers, fewer than asked for where there is no room.

    Args:
        rows: Take `PART.seconds_in_all` and `PART.held_back`.
        options: Of the part.
        folder: Emptied before.
        asked: Layers.
        workers: Processes that write.
        part: Name in the rows.
    """
    name = preset_name(options)
    shutil.rmtree(folder, ignore_errors=True)
    layers = _layers_with_room(folder.parent, name, asked)
    params = {"preset": name, "layers": layers, "asked": asked, "workers": workers}
    shards = min(_SHARDS, 12 * workers)
    command = [sys.executable, "-m", "halocline", "make-model", str(folder), "--on-device", "--preset", name]
    command += ["--layers", str(layers), "--shards", str(shards), "--workers", str(workers)]
    begun = time.monotonic()
    log = options.out / f"{folder.name}.txt"
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        held_back = _write_as_memory_grows(process)
    text = log.read_text(errors="replace")
    if process.returncode != 0:
        raise RuntimeError(f"make-model ended with {process.returncode}: {text[-900:]}")
    gigabytes = round(sum(path.stat().st_size for path in folder.iterdir()) / 1e9, 2)
    seconds = round(time.monotonic() - begun, 1)
    rows.add(f"{part}.seconds_in_all", seconds, "s", params={**params, "GB": gigabytes, "said": text[-300:]})
    rows.add(f"{part}.held_back", held_back, "s", params=params)
    return layers


def _layers_with_room(folder: Path, name: str, asked: int) -> int:
    """As many layers as asked for, or as fit when a file system in memory cannot be made large enough."""
    whole = preset(name)
    room = _room(folder, int(totals(first_layers(whole, asked)).resident_bytes) + _SPARE)
    fitting = [n for n in range(1, asked + 1) if totals(first_layers(whole, n)).resident_bytes + _SPARE <= room]
    if not fitting:
        raise RuntimeError(f"{folder} has {room / 1e9:.1f} GB free: not enough for one layer and {_SPARE / 1e9:.1f} GB")
    return fitting[-1]


def _room(folder: Path, needed: int) -> int:
    """Free bytes of a file system; one in memory is made larger if need be and if this user may."""
    free = shutil.disk_usage(folder).free
    if free < needed and folder == Path("/dev/shm"):
        size = f"size={max(_MOUNT, shutil.disk_usage(folder).used + needed) >> 20}M"
        done = subprocess.run(
            ["mount", "-o", f"remount,{size}", str(folder)], capture_output=True, text=True, check=False
        )
        sys.stdout.write(f"remount {size}: {done.returncode} {done.stderr.strip()}\n")
        free = shutil.disk_usage(folder).free
    return free


def _write_as_memory_grows(process: subprocess.Popen[bytes]) -> float:
    """Waits for a process and its workers; returns for how many seconds all workers but one stood still."""
    still = 0.0
    while process.poll() is None:
        time.sleep(_LOOK_SECONDS)
        free = _free_memory()
        if free > _LEAST_FREE:
            continue
        # The process, a helper of Python's and a worker go on. One that stands still may hold a lock that it needs:
        # after a while all go on for a moment.
        others = family_of(process.pid)[3:]
        begun, longest = time.monotonic(), 0.5 if free > _LEAST_FREE / 2 else 2.0
        _tell(others, signal.SIGSTOP)
        try:
            while process.poll() is None and time.monotonic() - begun < longest and _free_memory() < _LEAST_FREE:
                time.sleep(_LOOK_SECONDS)
        finally:
            _tell(others, signal.SIGCONT)
        still += time.monotonic() - begun
    return round(still, 1)


def _tell(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _free_memory() -> int:
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) * 1024
