"""Prompts of the graded model's suites as token ids, with what the CPU reference answers, for a GPU session.

The GPU machine may lack the packages that render prompts, so they are rendered here, once. The reference answers the
suite `check` in the recipe that GPUs serve.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halocline.engine.grading import MAX_NEW_TOKENS, Exercise, load_suite
from halocline.engine.llm import LLM
from halocline.engine.sampling_params import SamplingParams
from halocline.hal.settings import process_settings

__all__ = ["main"]

_LONGEST = 2200  # tokens of a prompt that the reference answers in reasonable time


def _row(llm: LLM, exercise: Exercise, suite: str) -> dict[str, Any]:
    prompt = llm.render_chat(exercise.messages, tools=exercise.tools, thinking=exercise.thinking, effort="low")
    return {"suite": suite, "name": exercise.name, "prompt": list(prompt.token_ids), "tokens": None, "margin": None}


def _answer(llm: LLM, rows: list[dict[str, Any]]) -> None:
    """Adds the reference's tokens and the smallest distance between the likeliest two at any of them."""
    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, logprobs=2)
    for row, result in zip(rows, llm.generate([row["prompt"] for row in rows], params), strict=True):
        output = result.outputs[0]
        assert output.logprobs is not None
        row["tokens"] = list(output.token_ids)
        row["margin"] = min(entry.top[0][1] - entry.top[1][1] for entry in output.logprobs)


def main(arguments: Sequence[str]) -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(prog="./dev bench gpu_prompts", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of the graded model")
    parser.add_argument("--out", type=Path, default=Path(".cache/gpu-prompts.json"), help="file to write")
    options = parser.parse_args(list(arguments))
    settings = replace(process_settings(), device="cpu")
    with LLM(options.model, recipe="served", max_requests=16, settings=settings, progress=False) as llm:
        rows = [
            _row(llm, exercise, suite)
            for suite in ("check", "graded")
            for exercise in load_suite(options.model / "suites" / f"{suite}.jsonl")
        ]
        _answer(llm, [row for row in rows if row["suite"] == "check" and len(row["prompt"]) <= _LONGEST])
    options.out.write_text(json.dumps(rows))
    sys.stdout.write(f"{len(rows)} prompts, {sum(row['tokens'] is not None for row in rows)} answered: {options.out}\n")
    return 0
