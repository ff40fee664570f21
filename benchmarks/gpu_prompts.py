"""Prompts of the graded model's suite as token ids, with what the CPU reference answers, for a GPU session.

The GPU machine may lack the package that renders prompts, so they are rendered here, once. The reference's answers come
from `halocline eval --recipe served --json` on a CPU: the numbers that GPUs serve, on the kernels that define them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.engine.agreement import EarlierAnswer, load_answers
from halocline.engine.evaluation import prompt_of
from halocline.engine.grading import Exercise, load_suite
from halocline.engine.tokenizer import Tokenizer
from halocline.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from halocline.engine.prompt import Prompter

__all__ = ["load_prompts", "main", "write_prompts"]


def write_prompts(model: Path, suite: str, answers: dict[str, EarlierAnswer], out: Path) -> int:
    """Writes the prompts of a suite and the answers that are known; returns how many are."""
    from halocline.engine.prompt import Prompter  # needs the package that GPU machines may lack

    exercises = load_suite(model / "suites" / f"{suite}.jsonl")
    tokenizer = Tokenizer.from_dir(model)
    bos = Checkpoint.open(model).config.bos_token_id
    prompter = Prompter(tokenizer, bos_id=bos, model_name=model.resolve().name)
    rows = [_row(prompter, exercise, answers.get(exercise.name)) for exercise in exercises]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"suite": suite, "items": rows}))
    return sum(row["answer"] is not None for row in rows)


def _row(prompter: Prompter, exercise: Exercise, known: EarlierAnswer | None) -> dict[str, Any]:
    prompt = prompt_of(prompter.chat, exercise)
    answer = None if known is None else {"output": known.output, "is_right": known.is_right}
    return {"name": exercise.name, "prompt": list(prompt), "answer": answer}


def load_prompts(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The suite's name and its items: name, prompt, and the reference's answer or None."""
    found = json.loads(path.read_text())
    return found["suite"], found["items"]


def main(arguments: Sequence[str]) -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(prog="./dev bench gpu_prompts", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of the graded model")
    parser.add_argument("--suite", default="graded", help="quick, check or graded")
    parser.add_argument("--answers", type=Path, required=True, help="from `halocline eval --recipe served --json`")
    parser.add_argument("--out", type=Path, default=Path(".whl/prompts.json"), help="file to write")
    options = parser.parse_args(list(arguments))
    count = write_prompts(options.model, options.suite, load_answers(options.answers), options.out)
    sys.stdout.write(f"{count} answers of the reference in {options.out}\n")
    return 0
