"""Parts of a GPU session that run other programs: compute-sanitizer, pytest, and the wheel by itself."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["errors_found", "find_program", "sanitizer", "tests", "wheel"]

_ROOT = Path(__file__).resolve().parent.parent
_SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")
# What needs a device there; other tests need packages that a GPU machine may lack.
_TESTS = ("tests/backends_cuda", "tests/benchmarks/test_device_faults.py")


def errors_found(text: str) -> int | None:
    """The errors that compute-sanitizer counted over all processes, or None if it said nothing."""
    counts = [int(count) for count in _SUMMARY.findall(text)]
    return sum(counts) if counts else None


def find_program(name: str) -> str | None:
    """A program of the path, or of the CUDA toolkit, whose folder often is not on it."""
    nvcc = shutil.which("nvcc")
    toolkit = [Path(nvcc).resolve().parent] if nvcc else []
    places = [str(folder) for folder in (*toolkit, Path("/usr/local/cuda/bin"))]
    return shutil.which(name) or shutil.which(name, path=":".join(places))


def sanitizer(rows: Rows, options: argparse.Namespace) -> None:
    """The portable kernels on their smallest inputs under compute-sanitizer, without torch's memory pool."""
    params = {"tool": options.tool, "ops": options.ops}
    with rows.guard("sanitizer", **params):
        program = find_program("compute-sanitizer")
        if program is None:
            raise RuntimeError("compute-sanitizer is nowhere; it comes with the CUDA toolkit")
        part = [sys.executable, "-m", "halocline.benchmarks", "gpu_parts", "smallest", "--tool", options.tool]
        part += ["--out", str(options.out), "--rows", str(options.rows or options.out / "rows.jsonl")]
        part += ["--commit", options.commit, "--label", options.label]
        part += ["--ops", *options.ops] if options.ops else []
        part += ["--kernels", *options.kernels] if options.kernels else []
        command = [program, "--tool", options.tool, "--target-processes", "all", "--print-limit", "20", *part]
        # Every tensor gets memory of its own, so that a read beside it is seen.
        done = _run(["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *command])
        (options.out / f"sanitizer-{options.tool}.txt").write_text(done.stdout + done.stderr)
        found = errors_found(done.stdout + done.stderr)
        if found is None or done.returncode != 0:
            raise RuntimeError(f"ended with {done.returncode}, {found} errors: {(done.stdout + done.stderr)[-600:]}")
        rows.add("sanitizer.errors", found, "errors", params=params)


def tests(rows: Rows, options: argparse.Namespace) -> None:
    """The tests that carry a device's marker."""
    with rows.guard("tests"):
        report = options.out / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda or hip", f"--junitxml={report}"]
        command += ["-c", str(_ROOT / "pyproject.toml")]
        command += ["-o", "addopts=--import-mode=importlib --strict-markers -ra", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors"]
        paths = options.tests or _TESTS
        done = _run([*command, *paths], cwd=_ROOT)
        (options.out / "tests.txt").write_text(done.stdout + done.stderr)
        if not report.is_file():
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        counts = _counted(report)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        rows.add("tests.counts", counts, "tests", params={"paths": list(paths), "failed": failed})


def _counted(report: Path) -> dict[str, int]:
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    total, skipped, failed, errors = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "failures", "errors")
    )
    return {"executed": total - skipped, "failed": failed + errors, "skipped": skipped}


# ---- the wheel ------------------------------------------------------------------------------------------------------


def wheel(rows: Rows, options: argparse.Namespace) -> None:
    """The wheel in an empty environment that has this Python's packages: what a new user runs first."""
    with rows.guard("wheel"):
        folders: list[Path] = options.wheels
        ours = sorted(path for folder in folders for path in folder.glob("halocline-*.whl"))
        if not ours:
            where = ", ".join(map(str, folders)) or "no folder"
            raise RuntimeError(f"there is no halocline-*.whl in {where}; ./dev wheel builds it into dist/")
        with TemporaryDirectory() as temporary:
            python = _environment(Path(temporary) / "venv")
            _install(rows, python, folders, ours[-1])
            version = _must([str(python), "-c", "import sys; print(sys.version.split()[0])"]).stdout.strip()
            checked = _run([*_pip(python), "check"], apart=True)
            rows.add("wheel.pip_check", checked.returncode, "exit status", params={"said": checked.stdout[-500:]})
            for command in ("demo", "doctor", "explain"):
                done = _run([str(python.parent / "halocline"), command], cwd=Path(temporary), apart=True)
                params = {"command": command, "python": version, "said": (done.stdout + done.stderr)[-700:]}
                rows.add("wheel.command", done.returncode, "exit status", params=params)


def _environment(folder: Path) -> Path:
    """An environment that sees the packages of this Python, which may itself be one; returns its Python."""
    _must([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "this-python.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return folder / "bin" / "python"


def _pip(python: Path) -> list[str]:
    """This Python's pip, working on another one."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]


def _install(rows: Rows, python: Path, folders: Sequence[Path], wheel: Path) -> None:
    """Installs the wheel with what it needs; where a package of this machine is too old, without asking for any."""
    places = [word for folder in folders for word in ("--find-links", str(folder))]
    install = [*_pip(python), "install", "-q", "--no-index", *places]
    done = _run([*install, str(wheel)], apart=True)
    rows.add("wheel.install", done.returncode, "exit status", params={"said": (done.stdout + done.stderr)[-700:]})
    if done.returncode != 0:
        every = sorted(str(path) for folder in folders for path in folder.glob("*.whl"))
        _must([*install, "--no-deps", *every])


def _run(command: Sequence[str], *, cwd: Path | None = None, apart: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a program; `apart` hides the checkout and the unpacked packages from it."""
    before = ["env", "-u", "PYTHONPATH"] if apart else []
    return subprocess.run([*before, *command], capture_output=True, text=True, check=False, cwd=cwd)


def _must(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = _run(command, apart=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command[:4])} ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}"
        )
    return done
