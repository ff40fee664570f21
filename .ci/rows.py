#!/usr/bin/env python3
"""The rows of the matrix that need a GPU: say which have a runner, judge what one brought back from `./dev gpu`.

    rows.py plan LABELS       prints `present=[...]`: the rows for which a runner is registered
    rows.py verdict ROW DIR   one line; 0 only if the row ran tests on its device and all passed

A row that did not run is never green: without a result `verdict` says "not run" and fails. Only the standard library
is used, because nothing can be installed on some of these machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROWS = {"sm90": "sm_90", "gfx942": "gfx942", "gfx950": "gfx950"}  # label of the runner: what its device must be


def main() -> int:
    """Parses the command line and does one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planner = commands.add_parser("plan", help="which rows have a runner")
    planner.add_argument("labels", help="labels of the registered runners, separated by spaces or commas")
    judge = commands.add_parser("verdict", help="what a row brought back")
    judge.add_argument("row", choices=ROWS)
    judge.add_argument("folder", type=Path, help="what `./dev gpu` wrote; may be missing")
    options = parser.parse_args()
    if options.command == "plan":
        print(f"present={json.dumps(present(options.labels))}")
        return 0
    text, status = verdict(options.row, options.folder)
    print(text)
    return status


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
