"""Options of the commands that load a model or sample from one, with one meaning everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halocline.cli.invocation import Invocation
from halocline.hal.errors import ConfigError, lines
from halocline.hal.settings import process_settings, set_library_variable

if TYPE_CHECKING:
    from halocline.engine.loading import PreparedModel
    from halocline.models.parallel import ParallelSizes

__all__ = [
    "CacheBytes",
    "DpAttention",
    "Effort",
    "Ep",
    "Gpus",
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
    "Tp",
    "is_leader",
    "prepare",
    "spread",
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

_RANKS = "Ranks"
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share the heads.", rich_help_panel=_RANKS)]
Ep = Annotated[int | None, typer.Option("--ep", min=1, help="Ranks that share whole experts.", rich_help_panel=_RANKS)]
DpAttention = Annotated[
    int | None,
    typer.Option("--dp-attention", min=1, help="Groups that attend to their own requests.", rich_help_panel=_RANKS),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="Number of ranks; sizes follow from a rule.", rich_help_panel=_RANKS),
]


def spread(
    ctx: typer.Context, model: Path | str, *, tp: int | None, ep: int | None, dp_attention: int | None, gpus: int | None
) -> ParallelSizes:
    """Over how many ranks the options, or the launcher, spread a model; starts the ranks if there are several.

    In the process that the user started this does not return: it starts one process for each rank with the same
    arguments, waits for them and exits with their status.

    Raises:
        ConfigError: If the model cannot be split so, or another number of processes was started.
    """
    from halocline.engine.ranks.joining import check_model_sizes, check_world
    from halocline.models.parallel import ParallelSizes
    from halocline.models.registry import load_config

    place = process_settings().place()
    given = {"tp": tp, "ep": ep, "dp": dp_attention}
    named = {name: size for name, size in given.items() if size is not None}
    if gpus is not None and named:
        raise ConfigError(
            lines("--gpus chooses the sizes", asked=f"it and {', '.join(named)}", try_="one or the other")
        )
    world = gpus or (place.world if place is not None else 1)
    sizes = ParallelSizes(**named) if named else _by_rule(model, world)
    if sizes.world > 1:
        config, family = load_config(model)
        check_model_sizes(family, config, sizes)
    if place is not None or sizes.world == 1:
        check_world(sizes, place)
        if place is not None:
            # Before torch is loaded: when a rank is lost, our own line is to be read and not its library's.
            set_library_variable("TORCH_CPP_LOG_LEVEL", "ERROR")
        return sizes
    from halocline.engine.ranks.launcher import launch_ranks

    invocation = ctx.find_object(Invocation)
    assert invocation is not None, "the console script makes one"
    raise SystemExit(launch_ranks(invocation.arguments, sizes.world))


def _by_rule(model: Path | str, world: int) -> ParallelSizes:
    from halocline.engine.parallel_rule import default_sizes
    from halocline.engine.ranks.joining import check_model_sizes
    from halocline.hal.probe import probe
    from halocline.models.parallel import ParallelSizes
    from halocline.models.registry import load_config

    if world == 1:
        return ParallelSizes()
    config, family = load_config(model)
    on_gpu = probe(process_settings()).is_gpu
    return default_sizes(family, config, world, on_gpu=on_gpu, check=check_model_sizes)[0]


def is_leader() -> bool:
    """Whether this process schedules: it is alone, or rank 0. Prompts and ports are the leader's business."""
    place = process_settings().place()
    return place is None or place.rank == 0


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
