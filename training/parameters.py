"""The trained parameters: float32 tensors by release name, how they begin, and how the release rounds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.weight_codecs import round_trip_weight
from halocline.models.deepseek_v4.weight_plan import plan_weights

if TYPE_CHECKING:
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["TrainedSource", "initial_parameters", "is_indexer"]


def is_indexer(name: str) -> bool:
    """Whether a parameter belongs to an indexer, which learns from its own loss only."""
    return ".indexer." in name


def initial_parameters(config: DeepseekV4Config, *, seed: int, device: str) -> dict[str, Tensor]:
    """Fresh parameters: normal matrices, unit gains, hyper-connections near one plain residual stream.

    Args:
        config: The model.
        seed: Of all random numbers.
        device: Where they go, in torch's words; the numbers do not depend on it.

    Returns:
        float32 tensors by name; hash tables int64.
    """
    gen = torch.Generator().manual_seed(seed)
    depth = len(config.compress_ratios)
    tensors = {}
    for parameter in plan_weights(config).parameters:
        name, shape = parameter.name, parameter.shape
        if name.endswith("tid2eid"):
            scores = torch.rand(shape[0], config.n_routed_experts, generator=gen)
            tensors[name] = scores.argsort(dim=1)[:, : shape[1]].contiguous()
        else:
            tensors[name] = _initial(config, name, shape, depth, gen)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _initial(config: DeepseekV4Config, name: str, shape: tuple[int, ...], depth: int, gen: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(("_scale",)):
        return torch.full(shape, 0.1)
    if name.endswith("_base"):
        return _stream_offsets(config.hc_mult, shape[0])
    if name.endswith(("attn_sink", "ape", "gate.bias")):
        return torch.zeros(shape)
    std = shape[-1] ** -0.5
    if name == "embed.weight":
        std = 0.5
    elif name.endswith(("wo_b.weight", "w2.weight")):
        std *= (2 * depth) ** -0.5
    return torch.randn(shape, generator=gen).mul_(std)


def _stream_offsets(n: int, count: int) -> Tensor:
    """Offsets of a site: read the mean of the streams, write to all, mix them little."""
    pre = torch.full((n,), -math.log(n - 1.0))
    if count == n:
        return pre
    return torch.cat((pre, torch.zeros(n), (4.0 * torch.eye(n)).flatten()))


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedSource:
    """Weights for one forward pass, rounded as the release stores them when `quantized`.

    Attributes:
        parameters: float32 tensors by release name.
        formats: Release format of each matrix.
        quantized: Round matrices through their format, straight-through for gradients.
    """

    parameters: Mapping[str, Tensor]
    formats: Mapping[str, WeightFormat]
    quantized: bool

    def tensor(self, name: str) -> Tensor:
        """See `WeightSource.tensor`."""
        return self.parameters[name]

    def matrix(self, name: str) -> Weight:
        """See `WeightSource.matrix`."""
        return _as_loaded(self._rounded(f"{name}.weight", self.parameters[f"{name}.weight"]))

    def experts(self, prefix: str, parts: tuple[str, ...], num_experts: int) -> Weight:
        """See `WeightSource.experts`."""
        stack = [
            torch.cat([self.parameters[f"{prefix}.{expert}.{part}.weight"] for part in parts])
            for expert in range(num_experts)
        ]
        return _as_loaded(self._rounded(f"{prefix}.0.{parts[0]}.weight", torch.stack(stack)))

    def _rounded(self, name: str, data: Tensor) -> Tensor:
        stored = self.formats.get(name, WeightFormat.FLOAT32)
        if not self.quantized or stored is WeightFormat.FLOAT32:
            return data
        return round_trip_weight(data, stored)


def _as_loaded(data: Tensor) -> Weight:
    return Weight(data=data, format=WeightFormat.FLOAT32, shape=tuple(data.shape))
