"""How a network is spread over processes: sizes, the place of a rank in them, and its groups. Free of torch.

`tp` ranks share the attention heads of the same tokens; `dp` groups of them each attend to their own requests; over
`ep` ranks whole experts are spread. The world has W = max(tp * dp, ep) ranks:

- rank = (dp_index * replicas + replica) * tp + tp_index, where W / (tp * dp) replicas repeat the same attention.
- ep_index = rank // moe_tp and moe_tp_index = rank % moe_tp, where moe_tp = W / ep ranks share an expert's width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from halocline.hal.errors import ConfigError, lines
from halocline.hal.process_group import ALONE, open_group

if TYPE_CHECKING:
    from halocline.hal.ops.collective import ProcessGroup

__all__ = ["SINGLE", "AllToAll", "Parallel", "ParallelSizes", "make_parallel"]

# How tokens reach the ranks that hold their experts; the values of the trait `a2a` that we run ourselves.
AllToAll = Literal["none", "all_to_all"]


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Over how many ranks heads, requests and experts are spread.

    Attributes:
        tp: Ranks that share the attention heads of the same tokens.
        dp: Attention groups, each with its own requests and caches.
        ep: Ranks over which whole experts are spread.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.ep) < 1:
            raise ConfigError(lines("a parallel size is at least 1", found=self))
        attention = self.tp * self.dp
        if self.world % attention or self.world % self.ep:
            fitting = [n for n in range(1, 8 * attention + 1) if attention % n == 0 or n % attention == 0]
            raise ConfigError(
                lines(
                    f"{attention} attention ranks (tp {self.tp} x dp {self.dp}) and {self.ep} expert ranks do not fit",
                    found="neither number divides the other",
                    try_=f"an expert-parallel size of {', '.join(map(str, fitting))}",
                )
            )

    @property
    def world(self) -> int:
        """Number of processes."""
        return max(self.tp * self.dp, self.ep)

    @property
    def replicas(self) -> int:
        """Copies of each attention group, which repeat its work for the same tokens."""
        return self.world // (self.tp * self.dp)

    @property
    def moe_tp(self) -> int:
        """Ranks that share the width of an expert."""
        return self.world // self.ep

    def __str__(self) -> str:
        return f"tp {self.tp}, dp {self.dp}, ep {self.ep}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Parallel:
    """The place of one rank, and the groups that it exchanges tensors with.

    Attributes:
        sizes: Over how many ranks everything is spread.
        rank: This process, from 0.
        attention: The `tp` ranks of this copy of the attention.
        data: The ranks with this place in every data-parallel group.
        world: All ranks.
        a2a: How tokens reach their experts: `none` when every rank sees all tokens and sums are reduced,
            `all_to_all` when each token's row is sent to the ranks that need it.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    rank: int = 0
    attention: ProcessGroup = ALONE
    data: ProcessGroup = ALONE
    world: ProcessGroup = ALONE
    a2a: AllToAll = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.sizes.world:
            raise ConfigError(f"rank {self.rank} is not one of {self.sizes.world} ({self.sizes})")
        sizes = self.sizes
        if self.a2a == "all_to_all" and not (sizes.tp == 1 and sizes.dp == sizes.ep):
            raise ConfigError(
                lines(
                    "tokens are sent to their experts only where each rank attends to requests of its own",
                    asked=f"all_to_all with {sizes}",
                    found="the exchange needs tp 1 and dp = ep",
                    try_=f"tp 1, dp {sizes.world}, ep {sizes.world}, or no exchange",
                )
            )

    @property
    def tp_index(self) -> int:
        """Which part of the heads this rank holds."""
        return self.rank % self.sizes.tp

    @property
    def replica(self) -> int:
        """Which copy of its attention group this rank belongs to."""
        return self.rank // self.sizes.tp % self.sizes.replicas

    @property
    def dp_index(self) -> int:
        """Which requests this rank attends to."""
        return self.rank // (self.sizes.tp * self.sizes.replicas)

    @property
    def ep_index(self) -> int:
        """Which run of experts this rank holds."""
        return self.rank // self.sizes.moe_tp

    @property
    def moe_tp_index(self) -> int:
        """Which part of its experts' width this rank holds."""
        return self.rank % self.sizes.moe_tp


SINGLE = Parallel()


def make_parallel(
    sizes: ParallelSizes,
    rank: int,
    device: str,
    *,
    a2a: AllToAll = "none",
    timeout: timedelta | None = None,
) -> Parallel:
    """Opens the groups of a rank; every rank of the world calls it, with the same sizes.

    Args:
        sizes: Over how many ranks everything is spread.
        rank: This process, as torch.distributed counts it.
        device: Where the tensors are, in torch's words.
        a2a: How tokens reach their experts.
        timeout: After which a collective that other ranks never enter fails; torch's own when left out.

    Raises:
        ConfigError: If rank or a2a do not go with the sizes.
        MachineError: If torch.distributed was not started with `sizes.world` processes.
    """
    Parallel(sizes=sizes, rank=rank, a2a=a2a)  # refused before anything is opened
    opened = {
        partition: open_group(partition, rank=rank, device=device, timeout=timeout)
        for partition in dict.fromkeys(_partitions(sizes))
    }
    attention, data, world = (opened[partition] for partition in _partitions(sizes))
    return Parallel(sizes=sizes, rank=rank, attention=attention, data=data, world=world, a2a=a2a)


def _partitions(sizes: ParallelSizes) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Ranks of every attention group, of every data group, and of the world."""
    ranks = range(sizes.world)
    across = sizes.world // sizes.dp  # ranks of one data-parallel group, replicas included
    attention = tuple(tuple(ranks[first : first + sizes.tp]) for first in range(0, sizes.world, sizes.tp))
    data = tuple(tuple(ranks[place::across]) for place in range(across))
    return attention, data, (tuple(ranks),)
