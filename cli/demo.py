"""``halocline demo``: the whole path on the CPU, checked against known answers.

First the graded model, where it is installed: its answers make sense and are marked. Then a tiny random model, which is
written on the spot: its answers make none, but every token is known.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halocline.cli.rank_options import RankOptions, is_leader, takes_ranks
from halocline.hal.errors import MachineError, lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halocline.engine.evaluation import Mark
    from halocline.engine.llm import LLM
    from halocline.engine.ranks.team import Team
    from halocline.hal.settings import Settings
    from halocline.hal.table import KernelTable
    from halocline.models.parallel import ParallelSizes

__all__ = ["EXERCISES", "GOLDEN_IDS", "LEAST_MARGIN", "PROMPT", "SEED", "check_answers", "check_ids", "demo"]

# One exercise of a kind, by its name in the suite `quick`.
EXERCISES = {"a sum": "sums-2", "a look-up": "lookup-2000-0", "a chat turn": "chat-3", "a tool call": "tools-1"}

PROMPT = (
    "Two waters meet at the halocline: fresh above, salt below. One model on the hardware of two vendors, and the same "
    "answers from both of them, token by token, far and near."
)
# The seed of the weights is chosen so that no choice is a close call: the runner-up is always this far behind.
# tests/cli/test_demo.py gets the same tokens from an implementation that shares no line with this one.
SEED = 82
LEAST_MARGIN = 0.05
# fmt: off
GOLDEN_IDS = (
    472, 349, 156, 211, 27, 442, 373, 319, 176, 426, 97, 200, 86, 269, 158, 414, 172, 468, 177, 283, 467, 210, 365, 210,
)
# fmt: on


@takes_ranks
def demo(
    ranks: RankOptions,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the tiny model here and leave it.")] = None,
) -> None:
    """Let the graded model answer four questions, then check a tiny random model token by token.

    Both go the whole way from a checkpoint in the release's number formats to text, on the reference kernels. A wrong
    answer or token ends with status 1.
    """
    start = time.monotonic()
    from halocline.engine.ranks.joining import join_ranks
    from halocline.models.deepseek_v4.presets import preset
    from halocline.models.registry import FAMILIES

    tiny = (preset("tiny"), FAMILIES["deepseek_v4"])
    sizes = ranks.spread(tiny)
    team = join_ranks(_on_cpu(), sizes)
    _ask_graded_model(sizes, team)
    with TemporaryDirectory(prefix="halocline-demo-") as temporary:
        is_leader = team is None or team.is_leader
        _run_tiny_model(keep if keep is not None and is_leader else Path(temporary) / "model", sizes, team)
    if team is not None:
        team.leave()
    _say(f"done in {time.monotonic() - start:.1f} s")


def _say(text: str) -> None:
    """Prints a line, on the rank that speaks."""
    if is_leader():
        typer.echo(text)


@contextmanager
def _open(folder: Path, sizes: ParallelSizes, team: Team | None, **more: Any) -> Iterator[LLM | None]:
    """A model on the CPU; None on ranks that only follow, once the model has been closed."""
    from halocline.engine.llm import LLM
    from halocline.engine.load_options import LoadOptions
    from halocline.engine.loading import prepare_model

    prepared = prepare_model(LoadOptions(model=folder, sizes=sizes, settings=_on_cpu(), **more), team=team)
    if team is not None and not team.is_leader:
        prepared.follow()
        yield None
        return
    with LLM(prepared.load()) as llm:
        yield llm


def _ask_graded_model(sizes: ParallelSizes, team: Team | None) -> None:
    from halocline.engine.evaluation import evaluate
    from halocline.engine.graded_model import find_graded_model, suite_file
    from halocline.engine.grading import MAX_NEW_TOKENS, load_suite

    folder = find_graded_model()
    if folder is None:
        _say("model: the graded one is not installed (the wheel does not carry it); a tiny random one has to do")
        return
    by_name = {exercise.name: exercise for exercise in load_suite(suite_file(folder, "quick"))}
    exercises = [by_name[name] for name in EXERCISES.values()]
    longest = max(exercise.prompt_tokens for exercise in exercises) + MAX_NEW_TOKENS
    with _open(folder, sizes, team, max_requests=len(exercises), max_positions=longest) as llm:
        if llm is None:
            return
        typer.echo(f"model: the graded one, {folder}, recipe {llm.recipe.name}")
        typer.echo(f"kernels {llm.kernels.digest} on {llm.kernels.device}")
        marks = evaluate(llm, exercises, progress=False).marks
    for what, mark in zip(EXERCISES, marks, strict=True):
        typer.echo(f"{what}: {_question(mark)} -> {_answer(mark)}: {'right' if mark.is_right else 'WRONG'}")
    check_answers(marks)
    typer.echo(f"proven: {len(marks)} of {len(marks)} answers of a trained model in the release's formats are right")


def _question(mark: Mark) -> str:
    """The last sentence that the user said, and how much came before it."""
    exercise = mark.exercise
    asked: str = next(m["content"] for m in reversed(exercise.messages) if m["role"] == "user")
    last = asked.rstrip(".?").rpartition(". ")[2]
    before = f"after {exercise.prompt_tokens:,} tokens: " if len(last) + 1 < len(asked) else ""
    return before + last + asked[len(asked.rstrip(".?")) :]


def _answer(mark: Mark) -> str:
    """The answer without its reasoning; tool calls as functions."""
    from halocline.engine.grading import parse_output

    answer = parse_output(mark.output, thinking=mark.exercise.thinking)
    calls = [
        f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in answer.calls or ()
    ]
    return " ".join([answer.content.strip(), *calls]).strip()


def check_answers(marks: Sequence[Mark]) -> None:
    """Accepts right answers only.

    Raises:
        MachineError: If one is wrong, with what was expected.
    """
    wrong = [mark for mark in marks if not mark.is_right]
    if wrong:
        raise MachineError(
            lines(
                f"the graded model answers {len(wrong)} of {len(marks)} exercises wrong",
                exercise=wrong[0].exercise.name,
                expected=repr(wrong[0].exercise.target),
                found=repr(wrong[0].output),
                try_="halocline eval --suite quick, and ./dev test tests/models to find the layer",
            )
        )


def _on_cpu() -> Settings:
    from dataclasses import replace

    from halocline.hal.settings import process_settings

    return replace(process_settings(), device="cpu")


def _run_tiny_model(folder: Path, sizes: ParallelSizes, team: Team | None) -> None:
    from halocline.cli.stream_printer import visible
    from halocline.engine.sampling_params import SamplingParams
    from halocline.models.checkpoint import Checkpoint
    from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
    from halocline.models.deepseek_v4.presets import preset

    make_checkpoint(folder, preset("tiny"), seed=SEED, num_shards=3)
    checkpoint = Checkpoint.open(folder)
    formats = ", ".join(f"{count} {name}" for name, count in sorted(checkpoint.formats.items()))
    _say(f"model: tiny, seed {SEED}, {checkpoint.nbytes:,} bytes; matrices: {formats}")
    with _open(folder, sizes, team, recipe="float32", max_requests=2, cache_bytes=2**26) as llm:
        if llm is None:
            return
        _print_kernels(llm.kernels)
        params = SamplingParams(temperature=0, max_tokens=len(GOLDEN_IDS), logprobs=2)
        output = llm.generate(PROMPT, params)[0].outputs[0]
        typer.echo(f"prompt: {PROMPT}\noutput: {visible(output.text)}\nids: {' '.join(map(str, output.token_ids))}")
        assert output.logprobs is not None
        margin = check_ids(output.token_ids, [entry.top for entry in output.logprobs])
        _check_prefill(llm, output.token_ids)
    typer.echo(
        f"proven: a checkpoint in the release's formats went through loader, kernels, cache and sampler to the "
        f"{len(GOLDEN_IDS)} known tokens, by single steps and by one prefill, no choice closer than {margin:.3f}"
    )


def check_ids(ids: Sequence[int], tops: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Compares greedy tokens with the golden ones.

    Args:
        ids: Tokens generated.
        tops: The two most likely tokens at each of them, with their log-probabilities.

    Returns:
        The smallest distance between the two.

    Raises:
        MachineError: If a token or a distance is not what it must be.
    """
    margin = min(top[0][1] - top[1][1] for top in tops)
    if tuple(ids) != GOLDEN_IDS or margin <= LEAST_MARGIN:
        where = next((i for i, (found, known) in enumerate(zip(ids, GOLDEN_IDS, strict=False)) if found != known), None)
        raise MachineError(
            lines(
                "the demo's tokens are not the known ones",
                expected=" ".join(map(str, GOLDEN_IDS)),
                found=" ".join(map(str, ids)),
                differs=None if where is None else f"first at token {where}",
                margin=f"{margin:.3f}, more than {LEAST_MARGIN} is needed",
                try_="./dev test tests/models, which compares every layer with an independent implementation",
            )
        )
    return margin


def _check_prefill(llm: LLM, ids: Sequence[int]) -> None:
    """Reads prompt and answer in one prefill: at each place the likeliest next token must be the one generated."""
    from halocline.engine.sampling_params import SamplingParams

    whole = [*llm.prompt_ids(PROMPT), *ids]
    result = llm.generate([whole], SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert result.prompt_logprobs is not None
    likeliest = [entry.top[0][0] for entry in result.prompt_logprobs[-len(ids) :]]
    if likeliest != list(ids):
        raise MachineError(lines("one prefill and single steps differ", single_steps=list(ids), prefill=likeliest))


def _print_kernels(table: KernelTable) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table("op", "kernel", "chosen by", box=None, padding=(0, 2, 0, 0))
    for row in table.rows():
        grid.add_row(row["op"], row["chosen"] or "-", row["source"])
    console = Console(markup=False, highlight=False)
    console.print(f"kernels {table.digest} on {table.device}")
    console.print(grid)
