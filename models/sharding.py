"""Which part of a network one rank holds, and which sizes can be. Free of torch.

What is split, and by what, stands in the weight plan (`Shard`). The rules about blocks are here, once: planning,
loading from files and loading from memory ask the same functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from halocline.hal.errors import ConfigError, lines
from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE
from halocline.models.parallel import Parallel, ParallelSizes
from halocline.models.weight_plan import Parameter, Split, WeightPlan, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RankPart", "block_of", "bytes_by_rank", "check_sizes", "cut_shape", "expert_run"]


def block_of(weight_format: WeightFormat | None) -> int:
    """Rows or lanes of which a slice holds a whole number.

    128 for every low-bit matrix: blocks of FP8 scales are that size, and so are the groups in which the input of the
    next product is rounded, whose lanes are the rows of this one.
    """
    return 1 if weight_format in (None, WeightFormat.FLOAT32, WeightFormat.BFLOAT16) else FP8_BLOCK_SIZE


def expert_run(num_experts: int, parallel: Parallel) -> range:
    """The experts that a rank holds: equal, contiguous runs."""
    count = num_experts // parallel.sizes.ep
    return range(parallel.ep_index * count, (parallel.ep_index + 1) * count)


def check_sizes(sizes: ParallelSizes, kinds: Iterable[Parameter], *, num_experts: int) -> None:
    """Refuses sizes that would cut a head, a group, a block or an expert in two.

    Args:
        sizes: Asked for.
        kinds: One parameter of each kind that is split.
        num_experts: Routed experts.

    Raises:
        ConfigError: With everything that does not divide, and the possible sizes.
    """
    parameters = [parameter for parameter in kinds if parameter.shard.split is not Split.SHARED]
    faults: dict[str, None] = {}
    possible = {split: set(range(1, 1025)) for split in (Split.ATTENTION, Split.EXPERTS)}
    for parameter in parameters:
        shard, length, block = parameter.shard, _length(parameter), block_of(parameter.format)
        possible[shard.split].intersection_update(shard.ways(length, block=block))
        size = sizes.tp if shard.split is Split.ATTENTION else sizes.moe_tp
        if not shard.divides(length, size, block=block):
            blocks = f" in blocks of {block}" if block > shard.unit_size else ""
            faults[f"{length // shard.unit_size} {shard.unit}{blocks} over {size} ranks"] = None
    if num_experts % sizes.ep:
        faults[f"{num_experts} experts over {sizes.ep} ranks"] = None
    if faults:
        raise ConfigError(
            lines(
                f"this model cannot be split as {sizes}; tp possible sizes: {_list(sorted(possible[Split.ATTENTION]))}",
                found="; ".join(faults),
                ep=f"possible sizes: {_list([n for n in range(1, num_experts + 1) if num_experts % n == 0])}",
                width=f"one expert over {_list(sorted(possible[Split.EXPERTS]))} rank(s), world / ep",
            )
        )


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank holds of a plan.

    Attributes:
        plan: Of the whole network.
        parallel: The rank's place.
    """

    plan: WeightPlan
    parallel: Parallel

    @cached_property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return 1 + max((p.shard.expert for p in self.plan.parameters if p.shard.expert is not None), default=-1)

    def holds(self, parameter: Parameter) -> bool:
        """Whether the rank holds the parameter, or a part of it."""
        expert = parameter.shard.expert
        return expert is None or expert in expert_run(self.num_experts, self.parallel)

    def cut(self, parameter: Parameter, weight_format: WeightFormat | None) -> slice | None:
        """Part of the cut axis that the rank holds, or None for all of it.

        Args:
            parameter: One that the rank holds.
            weight_format: As planned, or as found in a file.

        Raises:
            ConfigError: If units or blocks do not divide among the ranks.
        """
        shard, sizes = parameter.shard, self.parallel.sizes
        if shard.axis is None:
            return None
        rank, size = self.parallel.tp_index, sizes.tp
        if shard.split is Split.EXPERTS:
            rank, size = self.parallel.moe_tp_index, sizes.moe_tp
        elif shard.split is Split.SHARED and not self._splits(parameter):
            return None
        if size == 1:
            return None
        return shard.slice_of(_length(parameter), rank=rank, size=size, block=block_of(weight_format))

    def _splits(self, parameter: Parameter) -> bool:
        """Whether the ranks share the shared expert; decided from the plan, so for all its matrices alike."""
        sizes = self.parallel.sizes
        fits = parameter.shard.divides(_length(parameter), sizes.tp, block=block_of(parameter.format))
        return sizes.tp == sizes.world and fits

    def of(self, parameter: Parameter) -> Parameter:
        """The parameter with the shape that it has on this rank, in its planned format."""
        cut = self.cut(parameter, parameter.format)
        return parameter if cut is None else replace(parameter, shape=cut_shape(parameter, cut))

    @cached_property
    def local_plan(self) -> WeightPlan:
        """The parameters of this rank, with their shapes there."""
        return WeightPlan(parameters=tuple(self.of(p) for p in self.plan.parameters if self.holds(p)))


def bytes_by_rank(plan: WeightPlan, sizes: ParallelSizes) -> tuple[dict[str, int], ...]:
    """Bytes of each rank's part, by group of the plan.

    Slices are equal, so a parameter takes as much on every rank that holds it.

    Raises:
        ConfigError: If the plan cannot be split so.
    """
    part = RankPart(plan=plan, parallel=Parallel(sizes=sizes))
    everywhere, runs = Counter[str](), [Counter[str]() for _ in range(sizes.ep)]
    known: dict[object, int] = {}
    for parameter in plan.parameters:
        shard = parameter.shard
        kind = (parameter.shape, parameter.format, parameter.dtype, parameter.scale_fmt, shard.axis, shard.split)
        if kind not in known:
            known[kind] = sum(entry.nbytes for entry in stored_tensors(part.of(parameter)))
        run = None if shard.expert is None else shard.expert * sizes.ep // part.num_experts
        (everywhere if run is None else runs[run])[parameter.group] += known[kind]
    places = [Parallel(sizes=sizes, rank=rank) for rank in range(sizes.world)]
    return tuple(dict(everywhere + runs[place.ep_index]) for place in places)


def cut_shape(parameter: Parameter, cut: slice) -> tuple[int, ...]:
    """Logical shape of a part."""
    assert parameter.shard.axis is not None
    shape = list(parameter.shape)
    shape[parameter.shard.axis] = cut.stop - cut.start
    return tuple(shape)


def _length(parameter: Parameter) -> int:
    assert parameter.shard.axis is not None
    return parameter.shape[parameter.shard.axis]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
