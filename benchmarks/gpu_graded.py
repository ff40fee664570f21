"""The graded model on a device: every answer marked, and held against those of the reference on a CPU."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.benchmarks.gpu_engine import kernel_flags, load_model
from halocline.benchmarks.gpu_prompts import load_prompts
from halocline.engine.agreement import EarlierAnswer, compare_answers
from halocline.engine.evaluation import Mark
from halocline.engine.grading import MAX_NEW_TOKENS, Exercise, grade, load_suite, score
from halocline.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_engine import GpuModel
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["graded", "keep", "marks_of", "report"]

_LONGEST = 8192


def graded(rows: Rows, options: argparse.Namespace) -> None:
    """Score, equal answers and the paired test, for each kernel set and batch size that was asked for."""
    suite, items = load_prompts(options.prompts)
    if options.items:
        items = items[: options.items]
    known = {exercise.name: exercise for exercise in load_suite(options.model / "suites" / f"{suite}.jsonl")}
    exercises = [known[item["name"]] for item in items]
    for name in options.sets:
        for batch in options.batches:
            graphs = not options.eager
            params = {"kernels": name, "batch": batch, "graphs": graphs, "suite": suite, "items": len(items)}
            with rows.guard("graded", **params):
                sizes = tuple(size for size in options.sizes.graph_sizes if size <= batch) if graphs else ()
                model = load_model(
                    options.model,
                    kernel_flags(name),
                    graph_sizes=sizes,
                    max_requests=batch,
                    max_positions=_LONGEST,
                )
                rows.add("graded.kernels", model.table.summary(), "text", params=params)
                start = time.perf_counter()
                answers = _answers(model, items, together=batch)
                rows.add("graded.run", round(time.perf_counter() - start, 2), "s", params=params)
                marks = marks_of(options.model, exercises, answers, model.engine.config.eos_ids)
                report(rows, params, marks, items)
                keep(options.out / f"answers-{name}-{batch}.json", marks)


def _answers(model: GpuModel, items: Sequence[dict[str, Any]], *, together: int) -> list[list[int]]:
    """All of them at once where the engine holds several requests; else one after the other."""
    prompts = [item["prompt"] for item in items]
    if together > 1:
        return model.generate(prompts, max_tokens=MAX_NEW_TOKENS)
    return [model.generate([prompt], max_tokens=MAX_NEW_TOKENS)[0] for prompt in prompts]


def marks_of(
    folder: Path, exercises: Sequence[Exercise], answers: Sequence[Sequence[int]], eos_ids: Sequence[int]
) -> list[Mark]:
    """Marked answers; one that does not end is wrong."""
    tokenizer, marks = Tokenizer.from_dir(folder), []
    for exercise, ids in zip(exercises, answers, strict=True):
        ended = bool(ids) and ids[-1] in eos_ids
        output = tokenizer.decode(ids[:-1] if ended else ids)
        marks.append(Mark(exercise=exercise, output=output, is_right=ended and grade(exercise, output)))
    return marks


def report(
    rows: Rows,
    params: dict[str, Any],
    marks: Sequence[Mark],
    items: Sequence[dict[str, Any]],
    *,
    name: str = "graded",
) -> None:
    """Rows of the score and of how the answers compare with those of the reference; their names begin with `name`."""
    lessons = score([mark.exercise for mark in marks], [mark.is_right for mark in marks])
    rows.add(
        f"{name}.score",
        sum(mark.is_right for mark in marks) / len(marks),
        "share",
        params={**params, "lessons": {lesson: [one.right, one.total] for lesson, one in lessons.items()}},
    )
    earlier = {
        item["name"]: EarlierAnswer(item["answer"]["output"], item["answer"]["is_right"])
        for item in items
        if item["answer"] is not None
    }
    if not earlier:
        rows.add(f"{name}.agreement", "the prompts file holds no answers of the reference", "error", params=params)
        return
    found = compare_answers(marks, earlier)
    apart = [m.exercise.name for m in marks if m.exercise.name in earlier and m.output != earlier[m.exercise.name][0]]
    value = {"same": found.same, "score": found.score, "reference_score": found.other_score, "p": found.p}
    rows.add(f"{name}.agreement", value, "share", params={**params, "compared": found.num_common, "apart": apart})


def keep(path: Path, marks: Sequence[Mark]) -> None:
    """Writes the answers, to be looked at."""
    path.write_text(json.dumps({"answers": [mark.to_json() for mark in marks]}, ensure_ascii=False))
