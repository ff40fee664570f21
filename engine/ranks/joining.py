"""Whether this process is one of several ranks, what they compare, and which sizes a model allows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from halocline import __version__
from halocline.engine.ranks.fingerprint import digest, setting_facts
from halocline.hal.errors import ConfigError, lines
from halocline.hal.formats import recipe

if TYPE_CHECKING:
    from halocline.engine.load_options import LoadOptions
    from halocline.engine.ranks.team import Team
    from halocline.hal.formats import Recipe
    from halocline.hal.place import RankPlace
    from halocline.hal.settings import Settings
    from halocline.hal.table import KernelTable
    from halocline.models.checkpoint import Checkpoint
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.parallel import AllToAll, ParallelSizes
    from halocline.models.registry import ModelFamily

__all__ = ["check_model_sizes", "check_world", "join_ranks", "start_facts"]


def join_ranks(settings: Settings, sizes: ParallelSizes, *, a2a: AllToAll = "none") -> Team | None:
    """Joins the other ranks if sizes ask for several.

    Returns:
        None for a process alone.

    Raises:
        ConfigError: If another number of processes was started than the sizes take.
        MachineError: If the others cannot be reached.
    """
    check_world(sizes, settings.place())
    if sizes.world == 1:
        return None
    from halocline.engine.ranks.team import Team

    return Team(settings, sizes, a2a=a2a)


def check_world(sizes: ParallelSizes, place: RankPlace | None) -> None:
    """Compares the sizes asked for with the number of processes that were started.

    Raises:
        ConfigError: If they differ.
    """
    found = 1 if place is None else place.world
    if sizes.world == found:
        return
    fitting = [f"tp {tp}, dp {found // tp}, ep {found}" for tp in range(1, found + 1) if found % tp == 0]
    raise ConfigError(
        lines(
            f"{sizes} makes {sizes.world} rank(s), but {found} {'was' if found == 1 else 'were'} started",
            found=f"WORLD_SIZE {found}",
            try_=f"torchrun with {sizes.world} processes in all, or {'; '.join(fitting)}",
        )
    )


def check_model_sizes(family: ModelFamily, config: DeepseekV4Config, sizes: ParallelSizes) -> None:
    """Refuses sizes by which a model cannot be split, before anything of it is read.

    Raises:
        ConfigError: With the possible sizes.
    """
    family.kernel_requests(config, recipe("float32"), tp_size=sizes.tp, dp_size=sizes.dp, ep_size=sizes.ep)


def start_facts(options: LoadOptions, checkpoint: Checkpoint, chosen: Recipe, table: KernelTable) -> dict[str, str]:
    """Everything that all ranks must have in common, in the order in which a difference is worth telling."""
    torch = sys.modules["torch"]
    weights = [
        (name, [part.value for part in (stored.parameter.role,)], stored.nbytes)
        for name, stored in checkpoint.parameters.items()
    ]
    own = ("model", "settings", "progress", "kernels")
    facts = {name: str(value) for name, value in vars(options).items() if name not in own}
    return {
        "version": __version__,
        "torch": str(torch.__version__),
        **setting_facts(options.settings),
        **{f"option {name}": value for name, value in sorted(facts.items())},
        "recipe": chosen.name,
        "configuration of the model": digest(repr(checkpoint.config)),
        "list of weights": digest(weights),
        "table of kernels": table.digest,
    }
