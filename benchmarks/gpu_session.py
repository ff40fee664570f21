"""Everything that is measured on one H200, within a few minutes and without a network; rows of JSON come out.

First all parts that check something run side by side, and with them the compilation of what is timed later. Then the
timed parts run alone. A part that fails or takes too long leaves its rows and its log; the others go on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from halocline.benchmarks.fetch_wheels import unpack

__all__ = ["main"]

_STREAMS = ("hyper_connection.read", "hyper_connection.write")
# By plan: parts that check or compile, side by side, then parts that are timed, alone and in order of importance.
_PLANS: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]] = {
    "full": (
        (
            ("parity",),
            ("tokens", "--eager"),
            ("parity_libraries",),
            ("tokens_libraries", "--eager"),
            ("decode_libraries", "--warm", "--shapes", "1", "8", "prefill"),
            ("decode_libraries", "--warm", "--shapes", "32", "128"),
            ("decode", "--warm", "--shapes", "prefill", "8", "1"),
            ("decode", "--warm", "--shapes", "128", "32"),
            ("graphs",),
            ("cases", "--families", "attention"),
            ("cases", "--families", "compressor", "kv_cache"),
            ("cases", "--families", "gemm", "hyper_connection"),
            ("cases", "--families", "moe"),
            ("cases", "--families", "indexer", "norm", "sampling", "collective"),
        ),
        (
            ("decode_libraries",),
            ("decode",),
            ("decode_libraries", "--shapes", "1", "32", "--trace"),
            ("decode_libraries", "--shapes", "1", "32", "--without"),
        ),
    ),
    "short": (
        (
            ("tokens_libraries", "--sampling", "reference"),
            ("tokens_libraries", "--without", *_STREAMS, "indexer.logits"),
            ("tokens",),
            ("graphs",),
            ("decode_libraries", "--warm", "--shapes", "1", "8"),
            ("decode_libraries", "--warm", "--shapes", "32", "128"),
            ("decode_libraries", "--warm", "--shapes", "prefill"),
            ("decode", "--warm", "--shapes", "prefill", "1"),
            ("decode", "--warm", "--shapes", "32", "128"),
            ("cases", "--families", "hyper_connection", "--kernels", "hyper_connection.read=flashinfer"),
            ("cases", "--families", "kv_cache", "--kernels", "kv_cache.write_rows=triton"),
            ("cases", "--families", "gemm", "--kernels", "gemm.linear=triton"),
            ("cases", "--families", "moe", "--kernels", "moe.experts=triton", "moe.experts=triton_kernels"),
            ("cases", "--families", "indexer", "sampling", "--kernels", "indexer.logits=deep_gemm",
             "sampling.sample=triton"),
        ),
        (
            ("decode_libraries", "--shapes", "1", "8", "32", "128", "prefill"),
            ("decode", "--shapes", "1", "32", "prefill", "128"),
            ("decode_libraries", "--shapes", "1", "32", "--trace"),
            ("decode_libraries", "--shapes", "1", "32", "--without"),
        ),
    ),
}  # fmt: skip
_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Session:
    """How parts are started.

    Attributes:
        out: Folder of logs.
        environment: `NAME=value` for `env`.
        options: Arguments that every part takes.
    """

    out: Path
    environment: tuple[str, ...]
    options: tuple[str, ...]

    def start(self, part: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a part in a process group of its own, with its output in a log."""
        name = "-".join(word.strip("-").replace("=", "-") for word in part)
        log = (self.out / f"{name}.log").open("wb")
        command = ["env", *self.environment, sys.executable, "-m", "halocline.benchmarks", "gpu_parts", *part]
        with log:
            return subprocess.Popen(
                [*command, *self.options], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, running: Iterable[tuple[Sequence[str], subprocess.Popen[bytes]]], deadline: float) -> None:
        """Waits for parts up to a time; those that are late are ended."""
        left = list(running)
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            for part, process in [(part, process) for part, process in left if process.poll() is not None]:
                _say(f"{' '.join(part)} ended with status {process.returncode}")
            left = [(part, process) for part, process in left if process.poll() is None]
        for part, process in left:
            _say(f"{' '.join(part)} is late and was ended")
            process.terminate()
        for _, process in left:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _say(text: str) -> None:
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stdout.flush()


def _deliver(work: Path, out: Path) -> None:
    """Packs logs, answers and dumps: few files come back from some machines."""
    for name, pattern in (("logs", "*.log"), ("answers", "*.json"), ("dumps", "dumps")):
        files = sorted(path.name for path in work.glob(pattern))
        if files:
            archive = out / f"{name}.tar.gz"
            subprocess.run(["tar", "-czf", str(archive), "-C", str(work), *files], check=False)


def _environment(folders: Iterable[Path], scratch: Path) -> tuple[str, ...]:
    nvcc = shutil.which("nvcc")
    toolkit = Path(nvcc).resolve().parent.parent if nvcc else Path("/usr/local/cuda")
    root = Path(__file__).resolve().parent.parent
    path = ":".join(str(folder) for folder in (root / "src", *folders))
    return (
        f"PYTHONPATH={path}",
        f"TRITON_CACHE_DIR={scratch / 'triton'}",
        f"DG_JIT_CACHE_DIR={scratch / 'deep_gemm'}",
        f"FLASHINFER_WORKSPACE_BASE={scratch / 'flashinfer'}",
        "FLASHINFER_CUDA_ARCH_LIST=9.0a",
        f"HALOCLINE_DUMP_DIR={scratch / 'work' / 'dumps'}",
        f"CUDA_HOME={toolkit}",
        "OMP_NUM_THREADS=1",
        "MAX_JOBS=6",
        "PYTHONFAULTHANDLER=1",
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the session."""
    parser = argparse.ArgumentParser(prog="./dev bench gpu_session", description=__doc__)
    parser.add_argument("--wheels", type=Path, help="folder of archives, from fetch_wheels")
    parser.add_argument("--prompts", type=Path, help="file from gpu_prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows and logs")
    parser.add_argument("--seconds", type=float, default=440.0, help="for everything")
    parser.add_argument("--checks", type=float, default=250.0, help="of these, for the parts that check")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--plan", choices=_PLANS, default="full", help="which parts run")
    options = parser.parse_args(list(arguments))
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path("/tmp/halocline-gpu")
    folders = unpack(options.wheels.resolve(), scratch / "site") if options.wheels else []
    _say(f"{len(folders)} packages unpacked after {time.monotonic() - start:.1f} s")
    prompts = ("--prompts", str(options.prompts)) if options.prompts else ()
    work, rows = scratch / "work", options.out / "rows.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    session = Session(
        out=work,
        environment=_environment(folders, scratch),
        options=("--out", str(work), "--rows", str(rows.resolve()), "--commit", options.commit, *prompts),
    )
    side_by_side, alone = _PLANS[options.plan]
    session.finish([(part, session.start(part)) for part in side_by_side], start + options.checks)
    _deliver(work, options.out)
    for number, part in enumerate(alone):
        # The first of those that are left gets two shares.
        left = start + options.seconds - time.monotonic()
        deadline = time.monotonic() + 2 * left / (len(alone) - number + 1)
        session.finish([(part, session.start(part))], deadline)
    _deliver(work, options.out)
    _say(f"{len(rows.read_text().splitlines()) if rows.exists() else 0} rows in {rows}")
    return 0
