"""Marks the graded model in every way that must give the same marks, one `halocline eval` after the other.

    ./dev bench graded run --work DIR [NAME...]            one report a run, every answer included
    ./dev bench graded keep --work DIR --out FILE          what documents quote, judged against the baseline

The baseline is `halocline eval --recipe recipe` on the shipped checkpoint, with the engine's defaults: on a CPU 32
requests at a time, steps of 1,024 tokens, the prefix cache on. Runs that leave out long prompts are compared with it
over the exercises that both answered.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halocline.benchmarks.gpu_rows import versions
from halocline.engine.agreement import EarlierAnswer, load_answers, paired_p

__all__ = ["BASELINE", "RUNS", "Run", "judge", "main", "table"]

BASELINE = "recipe"
_LONGEST = ("--longest-prompt", "2300")  # 308 of 326 exercises, two fifths of the tokens
_SHORT = ("--longest-prompt", "299")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to mark the model.

    Attributes:
        options: Of `halocline eval`.
        most: Difference of scores from the baseline's that is allowed.
        chance: Whether a larger one is allowed too when the paired exact test calls it chance (p > 0.05).
        is_plain: Whether the model is the bfloat16 checkpoint, which may only be ahead by `most`.
    """

    options: tuple[str, ...]
    most: float = 0.02
    chance: bool = True
    is_plain: bool = False


RUNS = {
    BASELINE: Run(options=("--recipe", "recipe", "--text"), most=0.0),
    "float32": Run(options=("--recipe", "float32", "--no-text"), most=0.01, chance=False),
    "served": Run(options=("--recipe", "served", "--text", *_LONGEST)),
    "bfloat16": Run(options=("--recipe", "float32", "--text", *_LONGEST), chance=False, is_plain=True),
    "prefix-hits": Run(options=("--recipe", "recipe", "--warm", "--no-text", *_LONGEST)),
    "no-prefix-cache": Run(options=("--recipe", "recipe", "--no-prefix-cache", "--no-text", *_LONGEST)),
    "steps-of-128": Run(options=("--recipe", "recipe", "--step-tokens", "128", "--no-text", *_LONGEST)),
    "steps-of-512": Run(options=("--recipe", "recipe", "--step-tokens", "512", "--no-text", *_LONGEST)),
    "steps-of-1": Run(
        options=("--recipe", "recipe", "--step-tokens", "1", "--max-requests", "1", "--no-text", *_SHORT)
    ),
    "batch-1": Run(options=("--recipe", "recipe", "--max-requests", "1", "--no-text", *_LONGEST)),
}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parent)
    return found.stdout.strip() or "unknown"


def _machine() -> str:
    """Words for the processor; the report itself names a GPU and counts threads."""
    info = Path("/proc/cpuinfo")
    rows = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores"


def _run(name: str, work: Path, model: Path, plain: Path | None) -> None:
    run = RUNS[name]
    folder = plain if run.is_plain else model
    if folder is None:
        raise SystemExit(f"run {name} needs --plain DIR, written by `python -m halocline.training.release --plain`")
    options = ["eval", "--model", str(folder), *run.options, "--json"]
    done = subprocess.run([sys.executable, "-m", "halocline", *options], stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    shown = ["halocline", "eval", *run.options, *(["--model", "PLAIN"] if run.is_plain else []), "--json"]
    facts = {"command": " ".join(shown), "commit": _commit(), "machine": _machine()}
    report |= facts | {"versions": versions() | report["versions"]}
    (work / f"{name}.json").write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def judge(run: Run, answers: dict[str, EarlierAnswer], baseline: dict[str, EarlierAnswer]) -> dict[str, Any]:
    """Compares a run with the baseline over the exercises that both answered.

    Returns:
        Their number, both scores, the share of equal raw texts, p of the paired exact test, whether the bound holds.
    """
    pairs = [(answer, baseline[name]) for name, answer in answers.items() if name in baseline]
    num_common = len(pairs)
    only_here = sum(here.is_right and not there.is_right for here, there in pairs)
    only_there = sum(there.is_right and not here.is_right for here, there in pairs)
    p = paired_p(only_here, only_there)
    ahead = only_here - only_there
    off = ahead if run.is_plain else abs(ahead)
    return {
        "exercises": num_common,
        "score": sum(here.is_right for here, _ in pairs) / num_common,
        "baseline_score": sum(there.is_right for _, there in pairs) / num_common,
        "same": sum(here.output == there.output for here, there in pairs) / num_common,
        "p": p,
        "holds": off <= run.most * num_common or (run.chance and p > 0.05),
    }


def _kept(name: str, work: Path) -> dict[str, Any]:
    """A run's figures: facts, marks and what was wrong, without the answers that were right."""
    report = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
    wrong = [{"name": one["name"], "output": one["output"]} for one in report["answers"] if not one["is_right"]]
    figures = {key: value for key, value in report.items() if key not in {"answers", "model", "agreement"}}
    compared = judge(RUNS[name], load_answers(work / f"{name}.json"), load_answers(work / f"{BASELINE}.json"))
    return {"run": name, **figures, "against_baseline": compared, "wrong": wrong}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the table in docs/graded.md."""
    lines = [
        "| run | options of `halocline eval` | exercises | score | worst lesson | baseline | same | p | bound |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        against, options = row["against_baseline"], " ".join(RUNS[row["run"]].options)
        name, lesson = min(row["lessons"].items(), key=lambda item: item[1]["score"])
        worst = f"{name} {lesson['score']:.3f}"
        lines.append(
            f"| {row['run']} | `{options}` | {against['exercises']} | {row['score']:.3f} | {worst} "
            f"| {against['baseline_score']:.3f} | {against['same']:.3f} | {against['p']:.3f} "
            f"| {'holds' if against['holds'] else 'MISSED'} |"
        )
    return lines


def _keep(work: Path, out: Path) -> bool:
    rows = [_kept(name, work) for name in RUNS if (work / f"{name}.json").exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    sys.stdout.writelines(line + "\n" for line in table(rows))
    return all(row["against_baseline"]["holds"] for row in rows)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="graded", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("do", choices=("run", "keep"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"runs: {', '.join(RUNS)}; all when left out")
    parser.add_argument("--work", type=Path, required=True, help="folder of whole reports")
    parser.add_argument("--model", type=Path, default=Path("graded"))
    parser.add_argument("--plain", type=Path, help="the bfloat16 checkpoint")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/graded/cpu.json"))
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.names if name not in RUNS]:
        parser.error(f"no such run: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    if chosen.do == "keep":
        return 0 if _keep(chosen.work, chosen.out) else 1
    chosen.work.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or RUNS:
        _run(name, chosen.work, chosen.model, chosen.plain)
    return 0
