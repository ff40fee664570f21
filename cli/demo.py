"""``halocline demo``: the whole path on a small random model, on the CPU, checked against known answers."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from halocline.hal.errors import MachineError, lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halocline.engine.llm import LLM
    from halocline.hal.table import KernelTable

__all__ = ["GOLDEN_IDS", "LEAST_MARGIN", "PROMPT", "SEED", "check_ids", "demo"]

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


def demo(
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the model here and leave it.")] = None,
) -> None:
    """Build a tiny random DeepSeek-V4, load it, generate, and check the tokens.

    The model has every kind of layer and the release's number formats; it runs in the float32 recipe on the reference
    kernels. Its answers make no sense, but they are known: a wrong token ends with status 1.
    """
    start = time.monotonic()
    with TemporaryDirectory(prefix="halocline-demo-") as temporary:
        _run(keep or Path(temporary) / "model")
    typer.echo(f"done in {time.monotonic() - start:.1f} s")


def _run(folder: Path) -> None:
    from dataclasses import replace

    from halocline.cli.stream_printer import visible
    from halocline.engine.llm import LLM
    from halocline.engine.sampling_params import SamplingParams
    from halocline.hal.settings import process_settings
    from halocline.models.checkpoint import Checkpoint
    from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
    from halocline.models.deepseek_v4.presets import preset

    make_checkpoint(folder, preset("tiny"), seed=SEED, num_shards=3)
    checkpoint = Checkpoint.open(folder)
    formats = ", ".join(f"{count} {name}" for name, count in sorted(checkpoint.formats.items()))
    typer.echo(f"model: tiny, seed {SEED}, {checkpoint.nbytes:,} bytes; matrices: {formats}")
    settings = replace(process_settings(), device="cpu")
    with LLM(folder, recipe="float32", max_requests=2, cache_bytes=2**26, settings=settings) as llm:
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
