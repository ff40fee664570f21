"""Everything that is measured on one GPU or two, within minutes and without a network; rows of JSON come out.

`./dev gpu` starts it. First the parts that check something run side by side, and with them the compilation of what is
timed later; then the timed parts run alone. A part that fails or takes too long leaves its rows and its log, the others
go on, and a later session with the same folder runs what is not done yet. docs/benchmarks.md is the run book.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halocline.benchmarks.fetch_wheels import unpack
from halocline.benchmarks.gpu_criteria import verdicts
from halocline.benchmarks.gpu_plan import CALLS, Part, chosen_parts
from halocline.benchmarks.gpu_rows import Rows, commit_here, read_rows
from halocline.benchmarks.gpu_tables import plan_table, verdict_lines
from halocline.benchmarks.gpu_tools import find_program
from halocline.hal.probe import probe
from halocline.hal.settings import process_settings

__all__ = ["MEMORY_GIB", "Running", "Session", "done_parts", "environment", "lacks", "main", "matrix_row"]

_POLL_SECONDS = 0.5
MEMORY_GIB = 132
_LARGE_GIB = 100  # parts that nearly fill the device must not lose memory to fragments
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Session:
    """How parts are started.

    Attributes:
        work: Folder of logs and answers.
        scratch: Folder of unpacked packages and of compiled kernels.
        environment: Variables of every part, beside those of this process.
        options: Arguments that every part takes.
        rows: Notes of the session itself.
        memory_gib: What parts that run side by side may take together.
        layers: Depth of the parts of several devices; theirs when left out.
        program: What takes a part's command.
    """

    work: Path
    scratch: Path
    environment: dict[str, str]
    options: tuple[str, ...]
    rows: Rows
    memory_gib: int = MEMORY_GIB
    layers: int | None = None
    program: tuple[str, ...] = (sys.executable, "-m", "halocline.benchmarks", "gpu_parts")

    def start(self, part: Part) -> Running:
        """Starts a part in a process group of its own, with its output in a log."""
        variables = {
            **self.environment,
            **caches(self.scratch / "own" / part.name if part.own_caches else self.scratch),
        }
        if part.alone:
            variables["OMP_NUM_THREADS"] = "8"
        if part.gib >= _LARGE_GIB:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        settings = [f"{name}={value}" for name, value in variables.items()]
        command = ["env", *settings, *self.program, *part.command]
        if self.layers and part.gpus > 1 and "--layers" not in part.command:
            command += ["--layers", str(self.layers)]
        with (self.work / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *self.options, "--label", part.name],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(part=part, process=process, begun=time.monotonic())

    def together(self, parts: Sequence[Part], deadline: float) -> None:
        """Runs parts side by side, each as soon as its memory is free; what is late is ended."""
        waiting, running = list(parts), list[Running]()
        while (waiting or running) and time.monotonic() < deadline:
            for part in list(waiting):
                taken = sum(one.part.gib for one in running)
                if taken + part.gib <= self.memory_gib or not running:
                    waiting.remove(part)
                    running.append(self.start(part))
            time.sleep(_POLL_SECONDS)
            running = [one for one in running if not self._ended(one)]
        for one in running:
            self._end(one)
        for part in waiting:
            self.rows.add("session.part", "not started", "status", params={"part": part.name})

    def in_turn(self, parts: Sequence[Part], deadline: float) -> None:
        """Runs parts one after the other; each may use the time that those behind it do not need."""
        for index, part in enumerate(parts):
            behind = sum(one.seconds for one in parts[index + 1 :])
            until = max(deadline - behind, time.monotonic() + min(part.seconds, deadline - time.monotonic()))
            self._alone(part, until)

    def _alone(self, part: Part, until: float) -> None:
        one = self.start(part)
        while time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            if self._ended(one):
                return
        self._end(one)

    def _ended(self, one: Running) -> bool:
        """Notes a part that has ended; ends one that takes longer than it may while others run."""
        status, seconds = one.process.poll(), time.monotonic() - one.begun
        if status is None:
            if one.part.alone or seconds < one.part.seconds:
                return False
            self._end(one)
            return True
        self._note(one, "done" if status == 0 else f"ended with {status}", seconds)
        return True

    def _end(self, one: Running) -> None:
        """Ends a part and what it has started: a child that lives on would keep the device's memory."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(one.process.pid, kind)
                one.process.wait(timeout=5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._note(one, "late", time.monotonic() - one.begun)

    def _note(self, one: Running, status: str, seconds: float) -> None:
        params = {"part": one.part.name, "seconds": round(seconds, 1)}
        self.rows.add("session.part", status, "status", params=params)


@dataclass(frozen=True, kw_only=True, eq=False)
class Running:
    """A part that has been started."""

    part: Part
    process: subprocess.Popen[bytes]
    begun: float


def done_parts(path: Path) -> set[str]:
    """The parts that came to a good end, by the rows of earlier sessions."""
    rows = read_rows(path) if path.exists() else []
    last = {row["params"]["part"]: row["value"] for row in rows if row["name"] == "session.part"}
    return {name for name, status in last.items() if status == "done"}


def caches(folder: Path) -> dict[str, str]:
    """Where compilers keep their kernels."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "DG_JIT_CACHE_DIR": str(folder / "deep_gemm"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
        "TILELANG_CACHE_DIR": str(folder / "tilelang"),
    }


def environment(site: Path, work: Path) -> dict[str, str]:
    """The variables of a part: the unpacked packages on its path, a toolkit for compilers, one host thread."""
    nvcc = shutil.which("nvcc")
    toolkit = Path(nvcc).resolve().parent.parent if nvcc else Path("/usr/local/cuda")
    # `./dev gpu` describes the checkout as an installed distribution in .cache/site, where backends are found.
    paths = (_ROOT / "src", _ROOT / ".cache" / "site", site)
    return {
        "PYTHONPATH": ":".join(str(path) for path in paths),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "HALOCLINE_DUMP_DIR": str(work / "dumps"),
        "CUDA_HOME": str(toolkit),
        "OMP_NUM_THREADS": "1",
        "MAX_JOBS": "6",
        "PYTHONFAULTHANDLER": "1",
    }


def _deliver(work: Path, out: Path) -> None:
    """Packs logs, answers and dumps: few files come back from some machines."""
    for name, pattern in (("logs", "*.log"), ("answers", "*.json"), ("texts", "*.[tx]*[tl]"), ("dumps", "dumps")):
        files = sorted(path.name for path in work.glob(pattern))
        if files:
            subprocess.run(["tar", "-czf", str(out / f"{name}.tar.gz"), "-C", str(work), *files], check=False)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of rows and logs; kept rows tell what is done already")
    parser.add_argument("--wheels", type=Path, nargs="+", default=[], help="folders of archives, from fetch_wheels")
    parser.add_argument(
        "--prompts", type=Path, help="file from gpu_prompts; prompts.json beside the folders of wheels if left out"
    )
    parser.add_argument("--parts", default="", metavar="A,B", help="only these parts, beside those of --calls")
    parser.add_argument("--calls", type=int, nargs="*", choices=CALLS, default=[], help="only the parts of these calls")
    parser.add_argument("--seconds", type=float, default=555.0, help="for each call")
    parser.add_argument(
        "--gib",
        type=int,
        default=MEMORY_GIB,
        help="device memory of parts side by side; less where sessions share a device",
    )
    parser.add_argument("--layers", type=int, help="depth of the parts of two GPUs; all of it when left out")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/halocline-gpu"), help="folder that may be lost")
    parser.add_argument("--again", action="store_true", help="also run what is done already")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows on a CPU that parts run")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    options = parser.parse_args(list(arguments))
    if options.out is None and not options.list:
        parser.error("--out is needed")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the session; 1 if a part did not come to a good end."""
    options, start = _parse(arguments), time.monotonic()
    names = [name for name in options.parts.split(",") if name]
    try:
        parts = chosen_parts(names, options.calls)
    except ValueError as error:
        sys.stderr.write(f"gpu: {error}\n")
        return 2
    if options.list:
        sys.stdout.write(plan_table(parts))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    done = set() if options.again else done_parts(path)
    parts = [part for part in parts if part.name not in done]
    session = _session(options, path, start)
    lacking = {part.name: what for part in parts if (what := lacks(part, options, session.scratch / "site"))}
    for name, what in lacking.items():
        session.rows.add("session.part", f"lacks {what}", "status", params={"part": name})
    parts = [part for part in parts if part.name not in lacking]
    # Parts that are named share the time; otherwise each call has as much as one.
    for group in (
        [parts]
        if names or len(options.calls) == 1
        else [[part for part in parts if part.call == call] for call in CALLS]
    ):
        if group:
            _run(session, group, options, start)
            start = time.monotonic()
    rows = read_rows(path)
    (options.out / "row.json").write_text(json.dumps(matrix_row(rows), indent=1) + "\n")
    left = [part.name for part in parts if part.name not in done_parts(path)]
    sys.stdout.write(verdict_lines([verdict for verdict in verdicts(rows) if verdict.passed is not None]))
    sys.stdout.write(f"{len(rows)} rows in {path}; not done: {', '.join(left) or 'nothing'}\n")
    sys.stdout.writelines(f"not run: {name} lacks {what}\n" for name, what in lacking.items())
    return int(bool(left))


def lacks(part: Part, options: argparse.Namespace, site: Path) -> str:
    """What a part needs and does not find; empty when it can run."""
    needs, device = part.needs, probe(process_settings())
    if device.is_gpu and device.num_devices < part.gpus:
        return f"{part.gpus} GPUs"
    if needs == "prompts.json":
        found = _prompts(options)
        return "" if found is not None and found.is_file() else needs
    if needs == "halocline wheel":
        return "" if any(any(folder.glob("halocline-*.whl")) for folder in options.wheels) else needs
    if not needs or find_program(needs) or (site / needs).is_dir() or importlib.util.find_spec(needs.replace("-", "_")):
        return ""
    return needs


def _prompts(options: argparse.Namespace) -> Path | None:
    beside = [folder.resolve().parent / "prompts.json" for folder in options.wheels]
    found: Path | None = options.prompts or next((path for path in beside if path.is_file()), None)
    return found


def _session(options: argparse.Namespace, path: Path, start: float) -> Session:
    """Unpacks what was brought along and says how parts are started."""
    work, site = options.scratch / "work", options.scratch / "site"
    work.mkdir(parents=True, exist_ok=True)
    commit = options.commit or commit_here()
    rows = Rows(path, part="session", commit=commit)
    unpacked = unpack(options.wheels, site)
    rows.add("session.unpacked", unpacked, "archives", params={"seconds": round(time.monotonic() - start, 1)})
    rows.add("session.device", str(probe(process_settings())), "text")
    prompts = _prompts(options)
    return Session(
        work=work,
        scratch=options.scratch,
        environment=environment(site.resolve(), work.resolve()),
        options=(
            *("--out", str(work.resolve()), "--rows", str(path.resolve()), "--commit", commit),
            *(("--prompts", str(prompts.resolve())) if prompts else ()),
            *(("--wheels", *(str(folder.resolve()) for folder in options.wheels)) if options.wheels else ()),
            *(("--tiny",) if options.tiny else ()),
        ),
        rows=rows,
        memory_gib=options.gib,
        layers=options.layers,
    )


def _run(session: Session, parts: Sequence[Part], options: argparse.Namespace, start: float) -> None:
    """Parts that check, as long as those that time something leave; then these."""
    alone = [part for part in parts if part.alone]
    reserved = sum(part.seconds for part in alone)
    session.together(
        [part for part in parts if not part.alone], start + max(options.seconds - reserved, options.seconds / 3)
    )
    _deliver(session.work, options.out)
    session.in_turn(alone, start + options.seconds)
    _deliver(session.work, options.out)


def matrix_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `.ci/rows.py verdict` judges: tests, parity and whether parts came to a good end."""
    last = {row["name"]: row for row in rows if row["unit"] != "error"}
    parity = {(r["params"]["op"], r["params"]["kernel"]): r["value"] for r in rows if r["name"] == "parity.kernel"}
    ends = {row["params"]["part"]: row["value"] for row in rows if row["name"] == "session.part"}
    return {
        "commit": rows[0]["commit"],
        "python": rows[0]["versions"]["python"],
        "tests": last["tests.counts"]["value"]
        if "tests.counts" in last
        else {"executed": 0, "failed": 0, "skipped": 0},
        "parity": {
            "device": last["session.device"]["value"] if "session.device" in last else "",
            "kernels": len(parity),
            "failed": [
                f"{op}={kernel}"
                for (op, kernel), value in parity.items()
                if value["within"] != value["cases"] or not value["complete"]
            ],
        },
        "benchmarks": {name: int(end != "done") for name, end in ends.items() if not end.startswith("lacks ")},
    }
