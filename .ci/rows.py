#!/usr/bin/env python3
"""The rows of the matrix that need a GPU: run one, say which have a runner, judge what one brought back.

    rows.py run --out DIR [--wheels DIR]   on the machine with the GPU; `./dev gpu` calls it
    rows.py plan LABELS                    prints `present=[...]`: the rows for which a runner is registered
    rows.py verdict ROW DIR                one line; 0 only if the row ran tests on its device and all passed

A row that did not run is never green: without a result `verdict` says "not run" and fails. Only the standard library
is used, because nothing can be installed on some of these machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROWS = {"sm90": "sm_90", "gfx942": "gfx942", "gfx950": "gfx950"}  # label of the runner: what its device must be
ROOT = Path(__file__).resolve().parent.parent
BENCHMARK_SECONDS = 600


def main() -> int:
    """Parses the command line and does one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run a row on this machine")
    runner.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    runner.add_argument("--wheels", type=Path, metavar="DIR", help="wheels to use beside this Python's packages")
    runner.add_argument("--no-benchmarks", action="store_true", help="tests and parity only")
    runner.add_argument("tests", nargs="*", metavar="PYTEST", help="handed to pytest; everything marked when left out")
    planner = commands.add_parser("plan", help="which rows have a runner")
    planner.add_argument("labels", help="labels of the registered runners, separated by spaces or commas")
    judge = commands.add_parser("verdict", help="what a row brought back")
    judge.add_argument("row", choices=ROWS)
    judge.add_argument("folder", type=Path, help="what `run` wrote; may be missing")
    options = parser.parse_args()
    if options.command == "run":
        return run(options.out, options.wheels, options.tests, benchmarks=not options.no_benchmarks)
    if options.command == "plan":
        print(f"present={json.dumps(present(options.labels))}")
        return 0
    text, status = verdict(options.row, options.folder)
    print(text)
    return status


# ---- run --------------------------------------------------------------------------------------------------------


def run(out: Path, wheels: Path | None, tests: list[str], *, benchmarks: bool) -> int:
    """Tests, parity and benchmarks; every part runs, also after one has failed. Writes and prints the row."""
    out.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if wheels is not None:
        unpack(wheels, ROOT / ".cache" / "gpu-site")
        environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT / ".cache/gpu-site")])
    # Works without our pytest plugins; --skip-limit is for machines without a GPU.
    pytest = ["-m", "pytest", "-o", "addopts=--import-mode=importlib --strict-markers -ra", "-m", "cuda or hip"]
    status = python([*pytest, f"--junitxml={out / 'tests.xml'}", *(tests or ["tests"])], environment, out / "tests.txt")
    parity = python(["-m", "halocline", "parity", "--json"], environment, out / "parity.json")
    row = {
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain")),
        "python": platform.python_version(),
        "tests": counted(out / "tests.xml"),
        "parity": agreed(out / "parity.json"),
        "benchmarks": measured(environment, out) if benchmarks else {},
    }
    (out / "row.json").write_text(json.dumps(row, indent=1) + "\n")
    print_row(row)
    failed = [name for name, code in row["benchmarks"].items() if code != 0]
    return int(status != 0 or parity != 0 or bool(failed))


def unpack(wheels: Path, site: Path) -> None:
    """Unpacks wheels into a folder for PYTHONPATH; nothing of this Python is changed and no index is asked."""
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, *sorted(str(path) for path in wheels.glob("*.whl"))], check=True)


def python(arguments: list[str], environment: dict[str, str], log: Path) -> int:
    """Runs this Python; what it prints goes to a file, its complaints beside it, and both to the screen on failure."""
    errors = log.with_suffix(".log")
    with log.open("w") as file, errors.open("w") as complaints:
        code = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=ROOT, stdout=file, stderr=complaints, check=False
        ).returncode
    if code != 0:
        print(f"{' '.join(arguments[:3])} ended with {code}:\n{log.read_text()[-4000:]}\n{errors.read_text()[-2000:]}")
    return code


def measured(environment: dict[str, str], out: Path) -> dict[str, int]:
    """Exit status of each benchmark; what it prints is kept beside."""
    listing = [sys.executable, "-m", "halocline.benchmarks"]
    text = subprocess.run(listing, env=environment, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    limit = ["timeout", str(BENCHMARK_SECONDS)] if shutil.which("timeout") else []
    codes = {}
    for name in names:
        with (out / f"benchmark-{name}.txt").open("w") as file:
            command = [*limit, *listing, name]
            codes[name] = subprocess.run(
                command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
            ).returncode
    return codes


def git(*arguments: str) -> str:
    """What git says of this checkout; empty where there is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def counted(report: Path) -> dict[str, int]:
    """How many tests were executed, failed and were skipped, from a JUnit report."""
    if not report.is_file():
        return {"executed": 0, "failed": 0, "skipped": 0}
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    total, skipped, failed, errors = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "failures", "errors")
    )
    return {"executed": total - skipped, "failed": failed + errors, "skipped": skipped}


def agreed(report: Path) -> dict[str, object]:
    """Device, number of kernels and those that failed, from what `halocline parity --json` printed."""
    try:
        facts = json.loads(report.read_text())
    except (OSError, json.JSONDecodeError):
        return {"device": "", "kernels": 0, "failed": []}
    failed = [f"{row['op']}={row['kernel']}" for row in facts["kernels"] if not row["within"]]
    return {"device": facts["device"], "kernels": len(facts["kernels"]), "failed": failed}


def print_row(row: dict) -> None:
    """The row in words."""
    tests, parity = row["tests"], row["parity"]
    print(f"device      {parity['device'] or 'unknown'}, Python {row['python']}, commit {row['commit'][:12]}")
    print(f"tests       {tests['executed']} executed, {tests['failed']} failed, {tests['skipped']} skipped")
    print(f"parity      {parity['kernels']} kernels, failed: {', '.join(parity['failed']) or 'none'}")
    for name, code in row["benchmarks"].items():
        print(f"benchmark   {name}: {'done' if code == 0 else f'ended with {code}'}")


# ---- plan and verdict -------------------------------------------------------------------------------------------


def present(labels: str) -> list[str]:
    """Rows for which a runner is registered, in our order; an unknown label is an error."""
    named = labels.replace(",", " ").split()
    unknown = sorted(set(named) - set(ROWS))
    if unknown:
        sys.exit(f"rows: no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return [row for row in ROWS if row in named]


def verdict(row: str, folder: Path) -> tuple[str, int]:
    """One line about a row, and 0 if it is good."""
    file = folder / "row.json"
    if not file.is_file():
        return f"{row}: not run (no runner brought a result)", 1
    facts = json.loads(file.read_text())
    tests, parity = facts["tests"], facts["parity"]
    if ROWS[row] not in parity["device"]:
        return f"{row}: not run (the runner's device is {parity['device'] or 'unknown'})", 1
    if tests["executed"] == 0:
        return f"{row}: not run (no test was executed, {tests['skipped']} were skipped)", 1
    bad = [f"{tests['failed']} of {tests['executed']} tests"] if tests["failed"] else []
    bad += [f"parity of {name}" for name in parity["failed"]] or ([] if parity["kernels"] else ["parity: no kernel"])
    bad += [f"benchmark {name}" for name, code in facts["benchmarks"].items() if code]
    if bad:
        return f"{row}: failed ({'; '.join(bad)})", 1
    return f"{row}: passed ({tests['executed']} tests, {parity['kernels']} kernels on {parity['device']})", 0


if __name__ == "__main__":
    sys.exit(main())
