"""Time on a device, and steps recorded on it. On a CPU a replay runs the step again, so that parts can be tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from halocline.engine.graphs import RerunCapture
from halocline.hal.backend import load_backend, load_manifests
from halocline.hal.probe import probe
from halocline.hal.settings import process_settings

__all__ = [
    "capture",
    "kernels_of",
    "median",
    "milliseconds",
    "milliseconds_once",
    "release",
    "settle",
    "stopwatch",
    "used_gib",
]


def settle() -> None:
    """Waits until the device has done what was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Gives memory that is not in use back to the device, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def used_gib() -> float:
    """GiB of the device's memory that are taken, by whoever."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Runs a function once, then records what it launches."""
    run()
    settle()
    backend = load_backend(load_manifests(), probe(process_settings()).vendor)
    return (RerunCapture() if backend is None else backend).capture(run)


def milliseconds(run: Callable[[], None], *, rounds: int) -> list[float]:
    """Milliseconds of calls, ascending, after three that warm up; by the device's own clock where it has one."""
    for _ in range(3):
        run()
    settle()
    return sorted(milliseconds_once(run) for _ in range(rounds))


def milliseconds_once(run: Callable[[], None]) -> float:
    """Milliseconds of one call, by the device's own clock where it has one."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def median(values: list[float]) -> float:
    """The middle of sorted values."""
    return values[len(values) // 2]


@contextmanager
def stopwatch(into: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds until the device has done the work of a block."""
    start = time.perf_counter()
    yield
    settle()
    into[name] = into.get(name, 0.0) + time.perf_counter() - start


def kernels_of(run: Callable[[], None]) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of each kernel of a call, the largest first; on a CPU, of each operation."""
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        run()
        settle()

    def microseconds(entry: Any) -> float:
        return float(entry.device_time_total if on_gpu else entry.self_cpu_time_total)

    entries = sorted(profiler.key_averages(), key=lambda entry: -microseconds(entry))
    found: dict[str, tuple[float, int]] = {}
    for entry in entries:
        if microseconds(entry) > 0:
            name = entry.key[:90]
            known = found.get(name, (0.0, 0))
            found[name] = (round(known[0] + microseconds(entry), 1), known[1] + entry.count)
    return found
