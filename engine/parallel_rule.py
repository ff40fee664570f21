"""How a model is spread over a number of ranks when only the number is given: a rule for each case, with its reason.

Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from halocline.hal.errors import ConfigError, lines
from halocline.models.parallel import ParallelSizes

if TYPE_CHECKING:
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.registry import ModelFamily

__all__ = ["RULES", "SizeRule", "default_sizes"]

Measure = Literal["one", "all", "by heads", "rest"]

# Heads that the attention kernels of both vendors compute at a time: fewer cost as much.
HEADS_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True)
class SizeRule:
    """The sizes for a kind of model, a kind of device and a range of worlds.

    Attributes:
        name: For messages.
        family: model_type of config.json.
        on_gpu: Whether ranks have a GPU each.
        most: Largest world that it speaks of.
        tp, dp, ep: `one`; `all` ranks; `by heads`: as many ranks as leave each the heads that kernels compute at a
            time; `rest`: so many groups as tp leaves.
        reason: Why.
    """

    name: str
    family: str
    on_gpu: bool
    most: int
    tp: Measure = "one"
    dp: Measure = "one"
    ep: Measure = "one"
    reason: str

    def sizes(self, world: int, num_heads: int) -> ParallelSizes:
        """The sizes for so many ranks and a model of so many heads."""
        by_heads = max(num_heads // HEADS_AT_A_TIME, 1)
        numbers = {"one": 1, "all": world, "by heads": by_heads if world % by_heads == 0 else 1}
        numbers["rest"] = world // numbers[self.tp]
        return ParallelSizes(tp=numbers[self.tp], dp=numbers[self.dp], ep=numbers[self.ep])


# The first that fits is taken.
RULES = (
    SizeRule(
        name="two GPUs",
        family="deepseek_v4",
        on_gpu=True,
        most=2,
        tp="all",
        ep="all",
        reason="two GPUs share one request's work, so a single answer comes sooner; the price is a copy of the cache "
        "on each, as there is one KV head, and attention kernels that pad 32 heads to 64",
    ),
    SizeRule(
        name="many GPUs",
        family="deepseek_v4",
        on_gpu=True,
        most=1024,
        tp="by heads",
        dp="rest",
        ep="all",
        reason="attention kernels compute 64 heads at a time and tensor parallelism copies the one KV head to every "
        "rank, so splitting heads further than that saves neither time nor cache; groups attend to requests of their "
        "own, and all ranks share the experts",
    ),
    SizeRule(
        name="CPUs",
        family="deepseek_v4",
        on_gpu=False,
        most=1024,
        ep="all",
        reason="whole experts divide for every model; each rank repeats the attention of all tokens",
    ),
)


def default_sizes(
    family: ModelFamily,
    config: DeepseekV4Config,
    world: int,
    *,
    on_gpu: bool,
    check: Callable[[ModelFamily, DeepseekV4Config, ParallelSizes], None],
) -> tuple[ParallelSizes, str]:
    """The sizes for a number of ranks, and why.

    Args:
        family: Which network.
        config: The model.
        world: Number of ranks.
        on_gpu: Whether each has a GPU.
        check: Raises `ConfigError` if the model cannot be split so.

    Raises:
        ConfigError: If no rule has sizes by which the model can be split.
    """
    if world == 1:
        return ParallelSizes(), "one rank holds everything"
    problems: list[str] = []
    for rule in RULES:
        if (rule.family, rule.on_gpu) != (family.model_type, on_gpu) or world > rule.most:
            continue
        sizes = rule.sizes(world, config.num_attention_heads)
        try:
            check(family, config, sizes)
        except ConfigError as error:
            problems.append(str(error).splitlines()[0])
            continue
        return sizes, f"rule for {rule.name}: {rule.reason}"
    raise ConfigError(
        lines(
            f"no rule spreads this model over {world} ranks",
            found="; ".join(problems) or "no rule for this kind of model and device",
            try_="another number, or --tp, --ep and --dp-attention",
        )
    )
