"""What GPU sessions found: a verdict on every line, tables for documents, and one file of rows to keep.

Rows of several calls are read together; a part that ran again replaces what it said before. What is kept carries the
device, versions and commit once: rows of two devices or commits are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halocline.benchmarks.gpu_criteria import latest, verdicts
from halocline.benchmarks.gpu_rows import read_rows
from halocline.benchmarks.gpu_tables import tables, verdict_lines

__all__ = ["main", "shared_facts"]

_SHARED = ("device", "commit", "versions")
_KEPT = ("name", "params", "value", "unit", "roof", "share")


def _is_quoted(row: dict[str, Any]) -> bool:
    name, params = row["name"], row["params"]
    return not (name.endswith(".seconds") or name.startswith("session.") or params.get("warm"))


def shared_facts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Device, versions and commit of all rows; a package that only some sessions had counts.

    Raises:
        ValueError: If there is more than one device, commit or version of a package.
    """
    facts: dict[str, Any] = {"device": rows[0]["device"], "commit": rows[0]["commit"], "versions": {}}
    for row in rows:
        for name in ("device", "commit"):
            if row[name] != facts[name]:
                raise ValueError(f"rows of two {name}s: {facts[name]} and {row[name]}; keep them apart")
        for package, version in row["versions"].items():
            known = facts["versions"].setdefault(package, version)
            if known != version:
                raise ValueError(f"rows of two versions of {package}: {known} and {version}; keep them apart")
    return facts


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of a call, or those of a kept file with its device, versions and commit in each.

    Raises:
        ValueError: If the file has none.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = [{**{name: kept[name] for name in _SHARED}, **row} for row in kept["rows"]]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name the rows.jsonl of a call") from error
    except (ValueError, KeyError, TypeError):  # a line for each row
        found = [row for row in read_rows(path) if row.keys() >= {*_KEPT, *_SHARED}]
    if not found:
        raise ValueError(f"{path} has no row; name the rows.jsonl of a call, or a file that --out has written")
    return found


def _keep(rows: Sequence[dict[str, Any]], path: Path) -> int:
    kept = [{key: row[key] for key in _KEPT} for row in latest(rows) if _is_quoted(row)]
    for row in kept:
        row["params"] = {name: value for name, value in row["params"].items() if name != "said"}  # words of programs
        if row["unit"] == "error":  # what follows is the place in a checkout
            row["value"] = row["value"].partition("\n")[0].partition(" | ")[0]
    kept.sort(key=lambda row: (row["name"], json.dumps(row["params"], sort_keys=True)))
    head = json.dumps(shared_facts(rows))[1:-1]
    lines = ",\n".join(json.dumps(row) for row in kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')
    return len(kept)


def main(arguments: Sequence[str]) -> int:
    """Prints verdicts and tables and writes the file; 1 if a line does not hold or was not run, 2 for unfit rows."""
    parser = argparse.ArgumentParser(prog="./dev bench gpu_results", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+", help="rows.jsonl of the calls, in their order, or kept files")
    parser.add_argument("--out", type=Path, help="file of rows to keep, benchmarks/results/DEVICE/COMMIT.json")
    parser.add_argument("--markdown", type=Path, help="file for verdicts and tables, beside the terminal")
    options = parser.parse_args(list(arguments))
    try:
        rows = [row for path in options.rows for row in _read(path)]
        facts = shared_facts(rows)
    except ValueError as error:
        sys.stderr.write(f"gpu_results: {error}\n")
        return 2
    found = verdicts(rows)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    text = f"{facts['device']}, commit {facts['commit']}, {versions}\n\n{verdict_lines(found)}"
    for title, body in tables(latest(rows)).items():
        text += f"\n### {title}\n\n{body}"
    sys.stdout.write(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.out is not None:
        count = _keep(rows, options.out)
        sys.stdout.write(f"\n{count} of {len(rows)} rows in {options.out}\n")
    return int(not all(verdict.passed for verdict in found))
