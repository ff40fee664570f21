"""``halocline eval``: how many exercises a model answers right, lesson by lesson, and what that is compared with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halocline.cli import model_options as options
from halocline.cli.rank_options import RankOptions, takes_ranks
from halocline.hal.errors import RequestError, lines

if TYPE_CHECKING:
    from halocline.engine.agreement import Agreement
    from halocline.engine.evaluation import Evaluation
    from halocline.engine.grading import Exercise
    from halocline.engine.llm import LLM
    from halocline.engine.loading import LoadedModel, PreparedModel

__all__ = ["evaluate"]


@takes_ranks
def evaluate(
    ranks: RankOptions,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Folder of the checkpoint. [default: the graded one]")
    ] = None,
    suite: Annotated[str, typer.Option(help="quick (24 exercises), check (60) or graded (326).")] = "graded",
    longest_prompt: Annotated[int | None, typer.Option(metavar="TOKENS", help="Leave out longer prompts.")] = None,
    recipe: options.RecipeName = None,
    kernel: options.Kernels = None,
    max_requests: Annotated[int | None, typer.Option(help="Requests at a time. [default: by the device]")] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step: prompts are read in chunks of at most that. [default: ditto]")
    ] = None,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Keep nothing between requests.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Read all prompts once before, into the prefix cache.")] = False,
    memory_fraction: options.MemoryFraction = None,
    cache_bytes: options.CacheBytes = None,
    text: Annotated[
        bool | None, typer.Option("--text/--no-text", help="Also measure plain text. [default: unless quick]")
    ] = None,
    compare_with: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An earlier run's --json, to compare answers with.")
    ] = None,
    at_least: Annotated[float | None, typer.Option(metavar="SCORE", help="End with status 1 below this.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, every answer included.")] = False,
) -> int:
    """Let a model answer exercises whose answers are known, and mark them.

    The exercises run through the normal engine, all together. An answer is right when it matches exactly. Held-out text
    gives a perplexity, and how often the draft layer's first guess is what the model itself writes.
    """
    from halocline.engine.agreement import compare_answers, load_answers
    from halocline.engine.evaluation import evaluate as run
    from halocline.engine.evaluation import read_prompts
    from halocline.engine.graded_model import graded_model
    from halocline.engine.llm import LLM

    earlier = load_answers(compare_with) if compare_with is not None else None
    folder = graded_model() if model is None else model
    exercises = _exercises(folder, suite, longest_prompt)
    prepared = options.prepare(
        folder,
        recipe=recipe,
        kernels=kernel,
        max_context=None,
        memory_fraction=memory_fraction,
        cache_bytes=cache_bytes,
        max_requests=max_requests,
        max_step_tokens=step_tokens,
        prefix_caching=not no_prefix_cache,
        sizes=ranks.spread(folder),
        a2a=ranks.a2a,
    )
    loaded = _with_room(prepared, exercises).load()
    with LLM(loaded) as llm:
        if warm:
            read_prompts(llm, exercises)
        evaluation = run(llm, exercises)
        facts = _facts(loaded, suite)
        measures = _measure_text(prepared, llm) if (suite != "quick" if text is None else text) else {}
    agreement = compare_answers(evaluation.marks, earlier) if earlier is not None else None
    (_print_json if as_json else _print)(evaluation, facts, measures, agreement)
    return int(at_least is not None and evaluation.score < at_least)


def _exercises(folder: Path, suite: str, longest_prompt: int | None) -> list[Exercise]:
    from halocline.engine.graded_model import SUITES, suite_file
    from halocline.engine.grading import load_suite

    if suite not in SUITES:
        raise RequestError(lines("no such suite", asked=suite, known=", ".join(SUITES)))
    exercises = load_suite(suite_file(folder, suite))
    kept = [e for e in exercises if longest_prompt is None or e.prompt_tokens <= longest_prompt]
    if not kept:
        shortest = min(e.prompt_tokens for e in exercises)
        raise RequestError(lines("no exercise is left", asked=f"prompts of up to {longest_prompt}", shortest=shortest))
    return kept


def _with_room(prepared: PreparedModel, exercises: list[Exercise]) -> PreparedModel:
    """The same model with a context that is as long as the exercises need, which keeps the caches small."""
    from halocline.engine.evaluation import prompt_of
    from halocline.engine.grading import MAX_NEW_TOKENS
    from halocline.engine.loading import prepare_model

    longest = max(len(prompt_of(prepared.prompter.chat, exercise)) for exercise in exercises)
    needed = min(longest + MAX_NEW_TOKENS, prepared.limits.max_tokens)
    roomy = prepare_model(dataclasses.replace(prepared.options, max_positions=needed), team=prepared.team)
    return dataclasses.replace(roomy, keeps_team=prepared.keeps_team)


def _facts(loaded: LoadedModel, suite: str) -> dict[str, Any]:
    """What was run, on what."""
    import torch

    from halocline import __version__

    config = loaded.engine.config
    return {
        "model": str(loaded.options.model),
        "suite": suite,
        "recipe": loaded.recipe.name,
        "device": str(loaded.kernels.device),
        "kernels": loaded.kernels.digest,
        "prefix_cache": config.prefix_caching,
        "max_requests": config.max_requests,
        "step_tokens": config.max_step_tokens,
        "threads": torch.get_num_threads(),
        "versions": {"halocline": __version__, "torch": torch.__version__},
    }


def _measure_text(prepared: PreparedModel, llm: LLM) -> dict[str, Any]:
    """Perplexity and, where there is a draft layer, acceptance of its first draft, on held-out text."""
    from halocline.engine.draft_acceptance import draft_acceptance
    from halocline.engine.evaluation import perplexity
    from halocline.engine.graded_model import text_file
    from halocline.engine.grading import load_texts

    texts = load_texts(text_file(prepared.options.model))
    measures: dict[str, Any] = {"perplexity": perplexity(llm, texts)}
    if prepared.checkpoint.config.num_mtp_layers and prepared.options.sizes.world == 1:  # drafts need every weight
        ids = [prepared.prompter.completion(text) for text in texts]
        measures["draft_acceptance"] = draft_acceptance(prepared.checkpoint, llm.recipe, llm.kernels, ids)
    return measures


def _print_json(
    evaluation: Evaluation, facts: dict[str, Any], measures: dict[str, Any], agreement: Agreement | None
) -> None:
    compared = {} if agreement is None else {"agreement": dataclasses.asdict(agreement)}
    report = {**facts, **measures, **compared, **evaluation.to_json()}
    typer.echo(json.dumps(report, ensure_ascii=False, indent=2, allow_nan=False))


def _print(
    evaluation: Evaluation, facts: dict[str, Any], measures: dict[str, Any], agreement: Agreement | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("lesson")
    for heading in ("right", "of", "score"):
        table.add_column(heading, justify="right")
    for name, lesson in evaluation.lessons.items():
        table.add_row(name, str(lesson.right), str(lesson.total), f"{lesson.share:.3f}")
    right = sum(mark.is_right for mark in evaluation.marks)
    table.add_row("all", str(right), str(len(evaluation.marks)), f"{evaluation.score:.3f}")
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"{facts['model']}, suite {facts['suite']}, recipe {facts['recipe']}")
    console.print(f"kernels {facts['kernels']} on {facts['device']}")
    console.print(
        f"{evaluation.prompt_tokens:,} tokens read, {evaluation.completion_tokens:,} written "
        f"in {evaluation.seconds:.1f} s"
    )
    if "perplexity" in measures:
        console.print(f"perplexity of held-out text: {measures['perplexity']:.4f}")
    if "draft_acceptance" in measures:
        console.print(f"first drafts accepted on held-out text: {measures['draft_acceptance']:.3f}")
    if agreement is not None:
        console.print(
            f"compared with the other run: {agreement.same:.3f} of {agreement.num_common} answers are the same, "
            f"score {agreement.score:.3f} against {agreement.other_score:.3f}, p = {agreement.p:.3f}"
        )
