"""Part of a GPU session on two ranks: the graded model through the product's own loader and engine, mode by mode."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from halocline.benchmarks.gpu_engine import GpuModel, kernel_flags
from halocline.benchmarks.gpu_graded import keep, marks_of, report
from halocline.benchmarks.gpu_prompts import load_prompts
from halocline.benchmarks.gpu_ranks import MODES, Rank, in_modes
from halocline.engine.grading import MAX_NEW_TOKENS, load_suite
from halocline.hal.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halocline.benchmarks.gpu_rows import Rows
    from halocline.engine.load_options import LoadOptions

__all__ = ["two_graded"]

_LONGEST = 8192
_TINY_ITEMS = 4


def two_graded(rows: Rows, options: argparse.Namespace) -> None:
    """Score, equal answers and the paired test of each mode whose sizes the model allows, as on one GPU."""

    def work(rank: Rank) -> None:
        _graded(rows, options, rank)

    asked: Sequence[str] = options.modes or options.sizes.two_modes
    refused = {name: said for name in asked if (said := _refusal(options, name))}
    for name, said in refused.items():
        rows.add("two_graded.refused", said, "text", params={"mode": name})
    in_modes(rows, options, [name for name in asked if name not in refused], work)


def _refusal(options: argparse.Namespace, name: str) -> str:
    """Why the model cannot be spread so; empty if it can."""
    from halocline.engine.ranks.joining import check_model_sizes
    from halocline.models.registry import load_config

    config, family = load_config(options.model)
    try:
        check_model_sizes(family, config, MODES[name].sizes)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return ""


def _graded(rows: Rows, options: argparse.Namespace, rank: Rank) -> None:
    from halocline.engine.loading import prepare_model

    suite, items = load_prompts(options.prompts)
    count = options.items or (_TINY_ITEMS if options.tiny else len(items))
    items = items[:count]
    batch = options.batches[0]
    graphs = rank.mode.captures and not options.eager
    params = {
        "mode": rank.name,
        "kernels": options.sets[0],
        "batch": batch,
        "graphs": graphs,
        "suite": suite,
        "items": len(items),
    }
    begun = time.perf_counter()
    prepared = prepare_model(_load_options(options, rank, batch, graphs=graphs), team=rank.team)
    if not rank.leads:
        prepared.follow()
        return
    loaded = prepared.load()
    rank.add(rows, "two_graded.ready", round(time.perf_counter() - begun, 2), "s", params=params)
    rank.add(rows, "two_graded.kernels", loaded.kernels.summary(), "text", params=params)
    begun = time.perf_counter()
    model = GpuModel(table=loaded.kernels, engine=loaded.engine)
    answers = model.generate([item["prompt"] for item in items], max_tokens=MAX_NEW_TOKENS)
    rank.add(rows, "two_graded.run", round(time.perf_counter() - begun, 2), "s", params=params)
    loaded.close()
    known = {exercise.name: exercise for exercise in load_suite(options.model / "suites" / f"{suite}.jsonl")}
    exercises = [known[item["name"]] for item in items]
    marks = marks_of(options.model, exercises, answers, loaded.limits.eos_ids)
    report(rows, params, marks, items, name="two_graded")
    keep(options.out / f"answers-two-{rank.name}.json", marks)


def _load_options(options: argparse.Namespace, rank: Rank, batch: int, *, graphs: bool) -> LoadOptions:
    from halocline.engine.load_options import LoadOptions

    more: dict[str, Any] = {}
    if not graphs:
        more["graph_sizes"] = ()
    return LoadOptions(
        model=options.model,
        recipe="served",
        kernels=kernel_flags(options.sets[0]),
        max_requests=batch,
        max_positions=_LONGEST,
        max_step_tokens=2048,
        cache_bytes=2**28 if rank.device == "cpu" else 2 * 2**30,
        sizes=rank.mode.sizes,
        a2a=rank.mode.a2a,
        progress=False,
        **more,
    )
