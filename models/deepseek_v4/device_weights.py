"""Random weights in the release's formats, made on the device where they are used: no files, no host memory.

Values have the size of trained ones (variance 1 / inputs), so that activations stay near 1 and routing near uniform.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch

from halocline.hal.formats import Weight, WeightFormat
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.parallel import SINGLE, Parallel
from halocline.models.sharding import RankPart, expert_run
from halocline.models.weight_plan import Role, StoredDtype

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.weight_plan import Parameter

__all__ = ["DeviceWeights"]

# Root mean square of uniformly drawn E2M1 codes.
_E2M1_RMS = 2.86
_BIAS_UE8M0 = 127


class DeviceWeights:
    """A `WeightSource` that computes each tensor when it is asked for: the part of one rank, as `RankPart` cuts it.

    What all ranks hold is the same on all of them; parts that are split are drawn for themselves.
    """

    def __init__(self, config: DeepseekV4Config, *, device: str, parallel: Parallel = SINGLE) -> None:
        self._part = RankPart(plan=plan_weights(config), parallel=parallel)
        self._num_experts = config.n_routed_experts
        self._device = device

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(device=self._device).manual_seed(zlib.crc32(name.encode()))

    def tensor(self, name: str) -> Tensor:
        """See `WeightSource.tensor`."""
        parameter = self._part.of(self._part.plan.by_name[name])
        generator = self._generator(name)
        if parameter.role is Role.INDEX:
            tokens, chosen = parameter.shape
            scores = torch.rand((tokens, self._num_experts), generator=generator, device=self._device)
            return scores.topk(chosen, dim=1).indices
        values = torch.randn(parameter.shape, generator=generator, device=self._device)
        if name.endswith("gate.bias"):
            values = torch.zeros_like(values)  # a random bias would send every token to the same few experts
        elif name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif len(parameter.shape) == 2 and name != "embed.weight":
            values = values / math.sqrt(parameter.shape[1])
        return values if parameter.dtype is StoredDtype.F32 else values.bfloat16()

    def matrix(self, name: str) -> Weight:
        """See `WeightSource.matrix`."""
        return self._make(self._part.plan.by_name[f"{name}.weight"], ())

    def experts(self, prefix: str, parts: tuple[str, ...], num_experts: int) -> Weight:
        """See `WeightSource.experts`."""
        held = expert_run(num_experts, self._part.parallel)
        first = self._part.plan.by_name[f"{prefix}.{held.start}.{parts[0]}.weight"]
        return self._make(first, (len(held),), num_parts=len(parts))

    def _make(self, whole: Parameter, stack: tuple[int, ...], *, num_parts: int = 1) -> Weight:
        parameter, inputs = self._part.of(whole), whole.shape[1]
        rows, lanes = parameter.shape
        shape = (*stack, rows * num_parts, lanes)
        generator, device = self._generator(parameter.name), self._device
        if parameter.format is WeightFormat.MXFP4:
            data = torch.randint(
                0, 256, (*shape[:-1], lanes // 2), dtype=torch.uint8, generator=generator, device=device
            )
            exponent = round(math.log2(inputs**-0.5 / _E2M1_RMS)) + _BIAS_UE8M0
            scale = torch.full((*shape[:-1], lanes // 32), exponent, dtype=torch.uint8, device=device)
            return Weight(data=data, format=WeightFormat.MXFP4, shape=shape, scale=scale)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        if parameter.format is WeightFormat.FP8_BLOCK:
            blocks = (*stack, -(-shape[-2] // 128), -(-lanes // 128))
            scale = torch.full(blocks, 2.0 ** round(math.log2(inputs**-0.5)), device=device)
            return Weight(data=values.to(torch.float8_e4m3fn), format=WeightFormat.FP8_BLOCK, shape=shape, scale=scale)
        values = values / math.sqrt(inputs)
        if parameter.dtype is StoredDtype.F32:
            return Weight(data=values.float(), format=WeightFormat.FLOAT32, shape=shape)
        return Weight(data=values, format=WeightFormat.BFLOAT16, shape=shape)
