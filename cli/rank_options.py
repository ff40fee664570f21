"""Options that spread a model over several ranks, with one meaning everywhere."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halocline.cli.main import Invocation
from halocline.hal.errors import ConfigError, lines
from halocline.hal.settings import process_settings, set_variables_of_ranks

if TYPE_CHECKING:
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.parallel import ParallelSizes
    from halocline.models.registry import ModelFamily

    Model = Path | tuple[DeepseekV4Config, ModelFamily]

__all__ = ["RankOptions", "is_leader", "takes_ranks"]

Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share the heads.")]
Ep = Annotated[int | None, typer.Option("--ep", min=1, help="Ranks over which the experts are spread.")]
DpAttention = Annotated[
    int | None, typer.Option("--dp-attention", min=1, help="Groups of ranks that attend to their own requests.")
]
A2a = Annotated[
    Literal["none", "all_to_all"],
    typer.Option(
        "--a2a",
        help="How tokens reach their experts: every rank sees all of them, or each row is sent (tp 1, dp = ep).",
    ),
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="Number of ranks; a rule chooses the sizes.")]


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What a call says about ranks.

    Attributes:
        arguments: Of the whole command line, to start further ranks with.
        tp: Ranks that share the heads.
        ep: Ranks over which the experts are spread.
        dp_attention: Groups that attend to their own requests.
        gpus: Number of ranks, instead of these.
        a2a: How tokens reach their experts.
    """

    arguments: tuple[str, ...]
    tp: int | None
    ep: int | None
    dp_attention: int | None
    gpus: int | None
    a2a: Literal["none", "all_to_all"] = "none"

    def spread(self, model: Model) -> ParallelSizes:
        """Over how many ranks the options, or the launcher, spread a model; starts the ranks if there are several.

        In the process that the user started this does not return: it starts one process for each rank with the same
        arguments, waits for them and exits with their status.

        Args:
            model: A folder, or what is known of a model that is not written yet.

        Raises:
            ConfigError: If the model cannot be split so, or another number of processes was started.
        """
        from halocline.engine.ranks.joining import check_model_sizes, check_world
        from halocline.models.parallel import Parallel
        from halocline.models.registry import load_config

        place = process_settings().place()
        sizes = self._sizes(model, 1 if place is None else place.world)
        if sizes.world > 1:
            config, family = load_config(model) if isinstance(model, Path) else model
            check_model_sizes(family, config, sizes)
        Parallel(sizes=sizes, a2a=self.a2a)  # refused now if they do not go together
        if place is not None or sizes.world == 1:
            check_world(sizes, place)
            if place is not None:
                set_variables_of_ranks()
            return sizes
        from halocline.engine.ranks.launcher import launch_ranks

        raise SystemExit(launch_ranks(self.arguments, sizes.world))

    def _sizes(self, model: Model, started: int) -> ParallelSizes:
        from halocline.models.parallel import ParallelSizes

        given = {"tp": self.tp, "dp": self.dp_attention, "ep": self.ep}
        named = {name: size for name, size in given.items() if size is not None}
        if self.gpus is not None and named:
            raise ConfigError(
                lines("--gpus chooses the sizes", asked=f"it and {', '.join(named)}", try_="one or the other")
            )
        return ParallelSizes(**named) if named else _by_rule(model, self.gpus or started)


def _by_rule(model: Model, world: int) -> ParallelSizes:
    from halocline.engine.parallel_rule import default_sizes
    from halocline.engine.ranks.joining import check_model_sizes
    from halocline.hal.probe import probe
    from halocline.models.parallel import ParallelSizes
    from halocline.models.registry import load_config

    if world == 1:
        return ParallelSizes()
    config, family = load_config(model) if isinstance(model, Path) else model
    on_gpu = probe(process_settings()).is_gpu
    return default_sizes(family, config, world, on_gpu=on_gpu, check=check_model_sizes)[0]


def is_leader() -> bool:
    """Whether this process schedules: it is alone, or rank 0. Prompts and ports are the leader's business."""
    place = process_settings().place()
    return place is None or place.rank == 0


def takes_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command --tp, --ep, --dp-attention, --gpus and --a2a; it gets them together as `ranks`."""

    @functools.wraps(command)
    def with_ranks(
        ctx: typer.Context, tp: Tp, ep: Ep, dp_attention: DpAttention, gpus: Gpus, a2a: A2a, **others: Any
    ) -> Any:
        invocation = ctx.find_object(Invocation)
        arguments = () if invocation is None else tuple(invocation.arguments)
        given = {"ctx": ctx} if "ctx" in own else {}
        ranks = RankOptions(arguments=arguments, tp=tp, ep=ep, dp_attention=dp_attention, gpus=gpus, a2a=a2a)
        return command(**given, **others, ranks=ranks)

    hints = typing.get_type_hints(command, localns={"RankOptions": RankOptions}, include_extras=True)
    own = dict(inspect.signature(command).parameters)
    kept = [p.replace(annotation=hints[name]) for name, p in own.items() if name not in ("ctx", "ranks")]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, keyword, default="none" if hint is A2a else None, annotation=hint)
        for name, hint in (("tp", Tp), ("ep", Ep), ("dp_attention", DpAttention), ("gpus", Gpus), ("a2a", A2a))
    ]
    parameters = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        *(p.replace(kind=keyword) for p in kept),
        *added,
    ]
    with_ranks.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_ranks.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_ranks
