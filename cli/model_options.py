"""Options of the commands that load a model or sample from one, with one meaning everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from halocline.engine.loading import PreparedModel

__all__ = [
    "CacheBytes",
    "Effort",
    "Kernels",
    "MaxContext",
    "MemoryFraction",
    "MinP",
    "Model",
    "NoThinking",
    "RecipeName",
    "Seed",
    "Temperature",
    "TopK",
    "TopP",
    "prepare",
]

Model = Annotated[Path, typer.Option("--model", metavar="DIR", help="Folder of the checkpoint.")]
RecipeName = Annotated[
    str | None, typer.Option("--recipe", help="Numbers: float32, recipe or served. [default: by the device]")
]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", help="Kernel override OP=KERNEL; several times.")]
MaxContext = Annotated[int | None, typer.Option(help="Longest context in tokens. [default: the model's]")]
MemoryFraction = Annotated[float | None, typer.Option(help="Share of the device's memory to use in all.")]
CacheBytes = Annotated[int | None, typer.Option(help="Bytes of the caches, instead of a share.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Probability that the tokens kept must cover.")]
TopK = Annotated[int, typer.Option(help="Number of tokens kept; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Least share of the largest probability.")]
Seed = Annotated[int | None, typer.Option(help="Names the draws; a random one is reported otherwise.")]
Effort = Annotated[str | None, typer.Option(help="Reasoning effort: none, low, high, max and more. [default: low]")]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="Answer without thinking first.")]


def prepare(
    model: Path,
    *,
    recipe: str | None,
    kernels: list[str] | None,
    max_context: int | None,
    memory_fraction: float | None,
    cache_bytes: int | None,
    **more: Any,
) -> PreparedModel:
    """Checks a model as the options say, before it is loaded; `more` are fields of `LoadOptions`."""
    from halocline.engine.loading import LoadOptions, prepare_model

    return prepare_model(
        LoadOptions(
            model=model,
            recipe=recipe,
            kernels=tuple(kernels or ()),
            max_positions=max_context,
            memory_fraction=memory_fraction,
            cache_bytes=cache_bytes,
            **more,
        )
    )
