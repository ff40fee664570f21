"""Keeps of a GPU session what documents quote: one file of rows with their device, versions and commit.

Answers of the graded suite are marked here, as the GPU machine may lack what that needs. Refusals of a case by a
kernel that says so in its manifest row are left out; differences beyond a tolerance stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halocline.engine.grading import grade, load_suite, score
from halocline.engine.tokenizer import Tokenizer

__all__ = ["main"]

_KEPT = ("name", "params", "value", "unit", "roof", "share")
_SHARED = ("device", "versions", "commit")
_NOT_QUOTED = ("parity.cases.seconds", "decode.weights", "decode.load.seconds", "graph.seconds", "tokens.seconds")


def _is_quoted(row: dict[str, Any]) -> bool:
    if row["name"] in _NOT_QUOTED or row["params"].get("warm") or row["name"].endswith(".calls"):
        return False
    return not (row["name"] == "parity.case" and "ShapeError" in str(row["value"]))


def _score(model: Path, answers: Path) -> list[dict[str, Any]]:
    """The share of right answers of the graded suite, over all lessons and by lesson."""
    suite, tokenizer = load_suite(model / "suites" / "graded.jsonl"), Tokenizer.from_dir(model)
    given: dict[str, list[int]] = json.loads(answers.read_text())
    right = [grade(exercise, tokenizer.decode(given[exercise.name])) for exercise in suite]
    lessons = {lesson: [found.right, found.total] for lesson, found in score(suite, right).items()}
    kernels = answers.stem.removeprefix("answers-")
    params = {"kernels": kernels, "graphs": True, "items": len(right), "lessons": lessons}
    row = {"name": "tokens.graded_score", "params": params, "value": sum(right) / len(right), "unit": "share"}
    return [{**row, "roof": None, "share": None}]


def main(arguments: Sequence[str]) -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(prog="./dev bench gpu_results", description=__doc__)
    parser.add_argument("rows", type=Path, help="rows.jsonl of a session")
    parser.add_argument("--answers", type=Path, nargs="*", default=[], help="its answers-*.json")
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of the graded model")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(list(arguments))
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    facts = {json.dumps([row[key] for key in _SHARED]) for row in rows}
    if len(facts) != 1:
        raise ValueError(f"{options.rows} holds rows of {len(facts)} devices, versions or commits; keep them apart")
    found = [{key: row[key] for key in _KEPT} for row in rows if _is_quoted(row)]
    for row in found:
        if row["unit"] == "error":  # what follows is the place in a checkout
            row["value"] = row["value"].partition("\n")[0].partition(" | ")[0]
    for answers in options.answers:
        found += _score(options.model, answers)
    found.sort(key=lambda row: (row["name"], json.dumps(row["params"], sort_keys=True)))
    head = json.dumps({key: rows[0][key] for key in _SHARED})[1:-1]
    lines = ",\n".join(json.dumps(row, sort_keys=False) for row in found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')
    sys.stdout.write(f"{len(found)} of {len(rows)} rows in {options.out}\n")
    return 0
