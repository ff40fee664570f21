"""What several GPUs allow: the roof of a decode step over the ranks of one machine, its exchanges included.

Each rank has the parts of `roofline.decode_step` that are left to it; an exchange takes the time of its bytes on the
links, and never less than a small one takes in a graph. With tensor parallelism every rank attends to the whole batch
with its share of the heads; with data-parallel attention to its share of the batch. Experts are spread either way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from halocline.benchmarks.roofline import H200, Kernel, Rates, decode_step
from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["Links", "RankStep", "best_step", "rank_step"]

Mode = Literal["tp", "dp"]

_SPLIT_BY_HEADS = ("wq_b", "wo_a", "wo_b")
_BF16 = 2.0
_SENT = 1.03  # bytes a lane of a row on its way to an expert: E4M3 and a float32 scale for each 128


@dataclass(frozen=True, kw_only=True)
class Links:
    """What GPUs of a machine exchange in a second.

    Attributes:
        bandwidth: Bytes one way, of each GPU.
        small: Seconds of a small all-reduce inside a graph, by number of GPUs; published figures of an H200.
    """

    bandwidth: float = 450e9
    small: tuple[tuple[int, float], ...] = ((2, 2.5e-6), (4, 2.8e-6), (8, 3.6e-6))

    def least(self, world: int) -> float:
        """Seconds that no exchange between so many GPUs goes below."""
        return dict(self.small).get(world, 4e-6)


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The roof of a step on each of several ranks.

    Attributes:
        mode: How attention is spread.
        serial: Seconds of one kernel after another, exchanges included.
        exchanges: Seconds of these.
        nodes: Graph nodes.
    """

    mode: Mode
    serial: float
    exchanges: float
    nodes: int


def rank_step(
    config: DeepseekV4Config,
    *,
    batch: int,
    context: int,
    world: int,
    mode: Mode,
    rates: Rates = H200,
    links: Links | None = None,
) -> RankStep:
    """The roof of a step in which the whole machine decodes one token for each of `batch` requests.

    Args:
        config: The model.
        batch: Requests of all ranks.
        context: Tokens before the step.
        world: Ranks.
        mode: `tp` spreads heads, `dp` requests.
        rates: Of each device.
        links: Between them.
    """
    own = batch if mode == "tp" else math.ceil(batch / world)
    alone = decode_step(config, batch=own, context=context, rates=rates).kernels
    together = decode_step(config, batch=batch, context=context, rates=rates).kernels
    kernels = [_share(mine, all_of, config, own, world, mode) for mine, all_of in zip(alone, together, strict=True)]
    computed = sum(max(rates.seconds(k.num_bytes, k.operations, k.unit), k.nodes * rates.node) for k in kernels)
    exchanged = 0.0 if world == 1 else _exchanges(config, batch, world, mode, links or Links())
    return RankStep(
        mode=mode, serial=computed + exchanged, exchanges=exchanged, nodes=sum(kernel.nodes for kernel in kernels)
    )


def best_step(
    config: DeepseekV4Config, *, batch: int, context: int, world: int, rates: Rates = H200, links: Links | None = None
) -> RankStep:
    """The lower of the roofs of both modes; requests are spread only where each rank has one."""
    modes: tuple[Mode, ...] = ("tp",) if world == 1 or batch < world else ("tp", "dp")
    found = [
        rank_step(config, batch=batch, context=context, world=world, mode=mode, rates=rates, links=links)
        for mode in modes
    ]
    return min(found, key=lambda step: step.serial)


def _share(alone: Kernel, together: Kernel, config: DeepseekV4Config, own: int, world: int, mode: Mode) -> Kernel:
    """What is left to a rank of a part: `alone` has the rows that it attends to, `together` those of all ranks."""
    part = alone.part
    if part == "experts":
        return replace(together, num_bytes=together.num_bytes / world, operations=together.operations / world)
    if part == "head":
        whole = alone if mode == "tp" else together
        return replace(whole, num_bytes=whole.num_bytes / world, operations=whole.operations / world)
    if mode == "dp":
        return alone
    if part in _SPLIT_BY_HEADS or part == "shared":
        return replace(alone, num_bytes=alone.num_bytes / world, operations=alone.operations / world)
    if part == "attention":  # queries and outputs of its heads, but every rank reads the one latent of all heads
        heads = own * config.num_attention_heads * config.head_dim * 2 * _BF16
        return replace(alone, num_bytes=alone.num_bytes - heads + heads / world, operations=alone.operations / world)
    return alone


def _exchanges(config: DeepseekV4Config, batch: int, world: int, mode: Mode, links: Links) -> float:
    row, least = config.hidden_size * _BF16, links.least(world)
    passed = (world - 1) / world / links.bandwidth
    if mode == "tp":  # a sum behind attention and one behind the experts
        return 2 * config.num_hidden_layers * max(least, 2 * batch * row * passed)
    rows = math.ceil(batch / world) * min(config.num_experts_per_tok, world)
    there, back = rows * config.hidden_size * _SENT * passed, rows * row * passed
    return config.num_hidden_layers * (max(least, there) + max(least, back))
