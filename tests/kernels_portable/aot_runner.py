"""Compiles cases of `aot_cases` for architectures, each in a process of its own, and prints one JSON row each.

A defect of the compiler ends a process; forking keeps that from ending the run and saves importing torch each time.
Run as a script: `python aot_runner.py [--case NAME] [--arch NAME] [--module NAME] [--write-report]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_archs import ARCHS, Arch
from aot_cases import Case
from isa import faults, read_isa, read_resource_usage

from halocline.kernels_portable.aot import Launch, compile_launch, recorded_launches

REPORT = Path(__file__).with_name("isa_report.json")
COLUMNS = ("kernel", "arch", "config", "vgpr", "agpr", "sgpr", "vgpr_spills", "scratch", "lds", "mfma")
# Upper-case constants that only repeat a size of the model or of a page say nothing about the choice of tiles.
SIZES = {
    "WIDTH", "ROPE", "PAGE_ROWS", "PAGE_STRIDE", "WINDOW_PAGE_ROWS", "WINDOW_PAGE_STRIDE", "WINDOW_ENTRIES", "HIDDEN",
    "SLOT_STRIDE", "ROW_STRIDE", "SCORES", "VOCABULARY", "N", "K", "FNUZ", "WINDOW_FNUZ", "KIND",
}  # fmt: skip


def config(launch: Launch) -> str:
    """Tile sizes, formats and element types, in words."""
    names = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    constants = [f"{n}={v}" for n, v in launch.arguments.items() if n in names and n not in SIZES]
    tensors = [a.dtype for a in launch.arguments.values() if hasattr(a, "dtype")]
    kinds = sorted({str(kind).removeprefix("torch.") for kind in tensors if kind.is_floating_point})
    out = launch.arguments.get("out_ptr")
    kinds += [f"out={str(out.dtype).removeprefix('torch.')}"] if out is not None else []
    options = [f"{name}={value}" for name, value in launch.options.items()]
    return " ".join([*kinds, *constants, *options])


def compile_row(launch: Launch, name: str, arch: Arch) -> dict[str, Any]:
    """Compiles one launch and states its facts and faults."""
    start = time.monotonic()
    compiled = compile_launch(launch, arch.compiler)
    row: dict[str, Any] = {"kernel": launch.name, "arch": name, "config": config(launch)}
    if arch.rules is None:
        row |= read_resource_usage(compiled)
        shared = arch.target.shared_memory
        row["faults"] = [f"{row['lds']} bytes of shared memory, there are {shared}"] if row["lds"] > shared else []
    else:
        isa = read_isa(compiled)
        row |= {key: value for key, value in dataclasses.asdict(isa).items() if key in COLUMNS}
        row["faults"] = faults(isa, arch.rules)
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


@dataclass(frozen=True)
class Child:
    """A process that compiles one launch, and the pipe that its row comes through."""

    pid: int
    pipe: int
    case: str
    about: dict[str, Any]


def start(case: str, launch: Launch, name: str) -> Child:
    """Forks a process that compiles a launch."""
    about = {"kernel": launch.name, "arch": name, "config": config(launch)}
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            row = compile_row(launch, name, ARCHS[name])
        except BaseException as error:  # the child must not return into the parent's code
            text = "".join(traceback.format_exception_only(error)).strip()[-2000:]
            row = {**about, "faults": [f"does not compile: {text}"]}
        with os.fdopen(writer, "w") as pipe:
            json.dump(row, pipe)
        os._exit(0)
    os.close(writer)
    return Child(pid, reader, case, about)


def finish(child: Child) -> dict[str, Any]:
    """The row of a process; what ended it early becomes a fault."""
    with os.fdopen(child.pipe) as pipe:
        text = pipe.read()
    status = os.waitpid(child.pid, 0)[1]
    if text:
        return {"case": child.case, **json.loads(text)}
    ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
    return {"case": child.case, **child.about, "faults": [f"the compiler ended: {ended}"]}


def launches(
    cases: Mapping[str, Case], names: Sequence[str], archs: Sequence[str]
) -> Iterator[tuple[str, Launch, str]]:
    """Case, launch and architecture of every configuration, each once."""
    for arch in archs:
        seen = set()
        for case in names:
            for launch in recorded_launches(lambda case=case, arch=arch: cases[case](ARCHS[arch])):  # type: ignore[misc]
                key = launch.name, config(launch)
                if key not in seen:
                    seen.add(key)
                    yield case, launch, arch


def main() -> int:
    """Compiles, prints rows, and returns 1 if a row has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", help="names in CASES; all when left out")
    parser.add_argument("--arch", action="append", choices=list(ARCHS), help="all when left out")
    parser.add_argument("--module", default="aot_cases", help="module beside this file that holds CASES")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--write-report", action="store_true", help=f"write {REPORT.name}")
    options = parser.parse_args()
    cases = importlib.import_module(options.module).CASES
    rows: list[dict[str, Any]] = []
    running: deque[Child] = deque()

    def take() -> None:
        rows.append(finish(running.popleft()))
        print(json.dumps(rows[-1]), flush=True)

    for case, launch, arch in launches(cases, options.case or list(cases), options.arch or list(ARCHS)):
        if len(running) == options.jobs:
            take()
        running.append(start(case, launch, arch))
    while running:
        take()
    if options.write_report:
        kept = [{column: row[column] for column in COLUMNS} for row in rows if ARCHS[row["arch"]].rules]
        kept.sort(key=lambda row: (row["kernel"], row["arch"], row["config"]))
        REPORT.write_text("[\n" + ",\n".join(json.dumps(row) for row in kept) + "\n]\n")
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
