"""Where a network's modules take their weights from while they are built.

Modules pull: each asks for its own tensors by the release's names, converts them through its bound kernels and lets
the stored form go, so that memory peaks at the model plus one tensor. A source is made for one rank and gives that
rank's part of every parameter, as the weight plan splits it: modules ask for names and never slice. A source that
reads a checkpoint knows at the end whether every tensor was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE
from halocline.models.sharding import expert_run

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.models.sharding import RankPart

__all__ = ["MappingSource", "Scope", "WeightSource", "join_rows"]


class WeightSource(Protocol):
    """Gives tensors by release name, on the device where the model runs."""

    def tensor(self, name: str) -> Tensor:
        """A plain tensor as stored, for example `layers.0.attn_norm.weight`."""
        ...

    def matrix(self, name: str) -> Weight:
        """A matrix with its scales, for example `layers.0.attn.wq_a` (reads `.weight` and what belongs to it)."""
        ...

    def experts(self, prefix: str, parts: tuple[str, ...], num_experts: int) -> Weight:
        """Matrices `prefix.e.part` of the rank's experts, parts of an expert joined by rows, stacked over experts.

        `num_experts` counts those of all ranks.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A source seen from one module: names are completed by the module's prefix."""

    source: WeightSource
    prefix: str = ""

    def __truediv__(self, child: str) -> Scope:
        return Scope(source=self.source, prefix=f"{self.prefix}{child}.")

    def tensor(self, name: str) -> Tensor:
        """See `WeightSource.tensor`."""
        return self.source.tensor(self.prefix + name)

    def matrix(self, name: str) -> Weight:
        """See `WeightSource.matrix`."""
        return self.source.matrix(self.prefix + name)

    def experts(self, name: str, parts: tuple[str, ...], num_experts: int) -> Weight:
        """See `WeightSource.experts`."""
        return self.source.experts(self.prefix + name, parts, num_experts)


@dataclass(frozen=True, eq=False, kw_only=True)
class MappingSource:
    """Plain float tensors by name: parameters under training, or a state dict under test.

    Attributes:
        tensors: Every tensor by release name; matrices under `name.weight`. Gradients flow through.
        part: What one rank takes of them; `None` for everything.
    """

    tensors: Mapping[str, Tensor]
    part: RankPart | None = None

    def tensor(self, name: str) -> Tensor:
        """See `WeightSource.tensor`."""
        whole = self.tensors[name]
        if self.part is None:
            return whole
        parameter = self.part.plan.by_name[name]
        cut = self.part.cut(parameter, None)
        if cut is None:
            return whole
        assert parameter.shard.axis is not None
        return whole.narrow(parameter.shard.axis, cut.start, cut.stop - cut.start).contiguous()

    def matrix(self, name: str) -> Weight:
        """See `WeightSource.matrix`."""
        return _plain(self.tensor(f"{name}.weight"))

    def experts(self, prefix: str, parts: tuple[str, ...], num_experts: int) -> Weight:
        """See `WeightSource.experts`."""
        import torch

        held = range(num_experts) if self.part is None else expert_run(num_experts, self.part.parallel)
        stack = [torch.cat([self.tensor(f"{prefix}.{expert}.{part}.weight") for part in parts]) for expert in held]
        return _plain(torch.stack(stack))


def _plain(data: Tensor) -> Weight:
    import torch

    stored = WeightFormat.BFLOAT16 if data.dtype == torch.bfloat16 else WeightFormat.FLOAT32
    return Weight(data=data, format=stored, shape=tuple(data.shape))


def join_rows(first: Weight, second: Weight) -> tuple[Weight, ...]:
    """One matrix with the rows of both, so that one product gives both results; both where that cannot be.

    Blocks of scales must not straddle the two, and each NVFP4 matrix has a global scale of its own.
    """
    import torch

    same = (first.format, first.fp8_dialect, first.data.dtype) == (second.format, second.fp8_dialect, second.data.dtype)
    straddles = first.format is WeightFormat.FP8_BLOCK and first.shape[0] % FP8_BLOCK_SIZE != 0
    if not same or straddles or first.format is WeightFormat.NVFP4:
        return first, second

    def joined(a: Tensor, b: Tensor) -> Tensor:
        if a.element_size() > 1:
            return torch.cat((a, b))
        return torch.cat((a.view(torch.uint8), b.view(torch.uint8))).view(a.dtype)

    scale = None if first.scale is None or second.scale is None else joined(first.scale, second.scale)
    shape = (first.shape[0] + second.shape[0], first.shape[1])
    return (replace(first, data=joined(first.data, second.data), scale=scale, shape=shape),)
