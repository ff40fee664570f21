"""What the hardware allows: the roofs of a decode step, of a prefill and of single kernels, from shapes and rates.

Two roofs of a step are given. `ideal` has all bytes at full bandwidth and all operations at full rate, overlapped.
`serial` has kernels one after another, each at the larger of its two times, and never less than a graph node takes: a
good engine without overlap between kernels comes near it, and shares are shares of it.

Rates are those measured on an H200: a copy on the device (bytes read and written) and products of 8,192 lanes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.presets import FLASH, first_layers, preset

__all__ = [
    "H200",
    "STEP_PEERS",
    "Kernel",
    "Peer",
    "Rates",
    "Step",
    "Totals",
    "decode_step",
    "distinct_experts",
    "gemm_seconds",
    "index_logits_seconds",
    "main",
    "prefill_rate",
    "sparse_attention_seconds",
    "totals",
]

Unit = Literal["bf16", "fp8"]

_FP4 = 0.5 + 1 / 32  # packed E2M1 and a UE8M0 scale for each 32 values
_FP8 = 1 + 4 / (128 * 128)  # E4M3 and a float32 scale for each block
_BF16, _FP32 = 2.0, 4.0
_ROW = 448 + 64 * 2 + 8  # bytes of a cached latent: E4M3, bfloat16 rotary lanes, scales
_KEY = 128 + 4  # bytes of an index key: E4M3 and a float32 scale
# Graph nodes of parts that take more than one kernel; hyper-connections are read and written at two places.
_NODES = {"hyper_connection": 4, "shared": 3, "compressor": 2, "index_weights": 2}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second.

    Attributes:
        bandwidth: Bytes.
        bf16: Operations of bfloat16 products.
        fp8: Operations of FP8 products.
        node: Seconds that a dependent kernel in a graph takes at least.
    """

    bandwidth: float
    bf16: float
    fp8: float
    node: float

    def seconds(self, num_bytes: float, operations: float, unit: Unit) -> float:
        """The larger of the two times."""
        return max(num_bytes / self.bandwidth, operations / (self.bf16 if unit == "bf16" else self.fp8))


H200 = Rates(bandwidth=4.29e12, bf16=790e12, fp8=1420e12, node=1e-6)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What another engine reaches on the same machine and shapes.

    Attributes:
        name: Engine and version.
        step: Milliseconds of a captured decode step, by batch.
        share: Of the serial roof, by batch.
        prefill: Share of the roof of a prefill of 8,192 tokens.
    """

    name: str
    step: dict[int, float]
    share: dict[int, float]
    prefill: float


# Measured on one H200 with 8 layers of Flash, context 8,192, MXFP4 experts, graphs on, no speculation. sglang: its
# decode graph, head included. vLLM: its decode graph and the head.
STEP_PEERS = (
    Peer(
        name="sglang 0.5.17",
        step={1: 1.95, 8: 3.57, 32: 7.32, 128: 12.5},
        share={1: 0.37, 8: 0.47, 32: 0.55, 128: 0.53},
        prefill=0.32,
    ),
    Peer(
        name="vLLM 0.26.0",
        step={1: 1.84, 8: 3.44, 32: 7.24, 128: 11.8},
        share={1: 0.40, 8: 0.49, 32: 0.55, 128: 0.57},
        prefill=0.32,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One part of a step: what it has to move and to compute at least, and in how many graph nodes."""

    part: str
    num_bytes: float
    operations: float
    unit: Unit
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """The roof of a step.

    Attributes:
        kernels: Its parts.
        ideal: Seconds with everything overlapped.
        serial: Seconds of one kernel after another.
        nodes: Graph nodes.
    """

    kernels: tuple[Kernel, ...]
    ideal: float
    serial: float
    nodes: int

    def by_part(self, rates: Rates) -> dict[str, float]:
        """Seconds of each part, over all layers and without the time of nodes."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            seconds = rates.seconds(kernel.num_bytes, kernel.operations, kernel.unit)
            found[kernel.part] = found.get(kernel.part, 0.0) + seconds
        return found


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sizes of a model.

    Attributes:
        parameters: All of them, draft layers left out.
        active: Of these, how many a token meets.
        resident_bytes: Of the weights on a device.
    """

    parameters: int
    active: int
    resident_bytes: float


def distinct_experts(config: DeepseekV4Config, tokens: int) -> float:
    """Expected number of experts that some of the tokens meet in a layer, with uniform routing."""
    share = config.num_experts_per_tok / config.n_routed_experts
    return config.n_routed_experts * (1 - (1 - share) ** tokens)


def _expert_parameters(config: DeepseekV4Config) -> int:
    return 3 * config.moe_intermediate_size * config.hidden_size


def _matrices(config: DeepseekV4Config, ratio: int) -> Iterator[tuple[str, int, float, Unit]]:
    """(part, parameters, bytes of each, unit) of a layer, routed experts apart."""
    hidden, head = config.hidden_size, config.head_dim
    heads = config.num_attention_heads * head
    yield "wq_a_wkv", hidden * (config.q_lora_rank + head), _FP8, "fp8"
    yield "wq_b", config.q_lora_rank * heads, _FP8, "fp8"
    yield "wo_a", config.o_lora_rank * heads, _FP8, "fp8"
    yield "wo_b", config.o_groups * config.o_lora_rank * hidden, _FP8, "fp8"
    yield "router", config.n_routed_experts * hidden, _BF16, "bf16"
    yield "shared", _expert_parameters(config), _FP8, "fp8"
    streams = config.hc_mult
    yield "hyper_connection", 2 * streams * (2 + streams) * streams * hidden, _FP32, "bf16"
    if ratio:
        yield "compressor", 2 * (2 if ratio == 4 else 1) * head * hidden, _BF16, "bf16"
    if ratio == 4:
        width, index_heads = config.index_head_dim, config.index_n_heads
        yield "index_query", config.q_lora_rank * index_heads * width, _FP8, "fp8"
        yield "index_weights", index_heads * hidden + 4 * width * hidden, _BF16, "bf16"


def totals(config: DeepseekV4Config) -> Totals:
    """Parameters and bytes of the main layers."""
    dense = [row for ratio in config.main_ratios for row in _matrices(config, ratio)]
    expert, layers = _expert_parameters(config), config.num_hidden_layers
    routed = expert * config.n_routed_experts * layers
    head = config.vocab_size * config.hidden_size
    parameters = sum(count for _, count, _, _ in dense)
    return Totals(
        parameters=parameters + routed + 2 * head,
        active=parameters + expert * config.num_experts_per_tok * layers + head,
        resident_bytes=sum(count * size for _, count, size, _ in dense) + routed * _FP4 + 2 * head * _BF16,
    )


def _keys(config: DeepseekV4Config, ratio: int, context: float) -> float:
    """Cache rows that a query of a layer reads."""
    compressed = {0: 0.0, 4: min(config.index_topk, context / 4), 128: context / 128}[ratio]
    return min(context, config.sliding_window) + compressed


def _step_kernels(config: DeepseekV4Config, tokens: int, context: int) -> Iterator[Kernel]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    for ratio in config.main_ratios:
        for part, count, size, unit in _matrices(config, ratio):
            # Two places, each reading and writing four streams and one row.
            moved = 20 * hidden * _BF16 * tokens if part == "hyper_connection" else 0.0
            yield Kernel(
                part=part,
                num_bytes=count * size + moved,
                operations=2 * count * tokens,
                unit=unit,
                nodes=_NODES.get(part, 1),
            )
        keys = float(int(_keys(config, ratio, context)))
        rows = keys * _ROW + heads * config.head_dim * 2 * _BF16
        work = 4 * heads * config.head_dim * keys
        yield Kernel(part="attention", num_bytes=tokens * rows, operations=tokens * work, unit="bf16", nodes=2)
        if ratio == 4:
            entries = context // 4
            work = 2 * config.index_n_heads * config.index_head_dim * entries
            scores, kept = entries * _FP32, config.index_topk * 4
            yield Kernel(
                part="index_logits",
                num_bytes=tokens * (entries * _KEY + scores),
                operations=tokens * work,
                unit="fp8",
                nodes=1,
            )
            yield Kernel(part="index_select", num_bytes=tokens * (scores + kept), operations=0, unit="bf16", nodes=1)
        expert = _expert_parameters(config)
        yield Kernel(
            part="experts",
            num_bytes=distinct_experts(config, tokens) * expert * _FP4,
            operations=2 * tokens * config.num_experts_per_tok * expert,
            unit="fp8",
            nodes=4,
        )
    head = config.vocab_size * hidden
    yield Kernel(part="head", num_bytes=head * _BF16, operations=2 * head * tokens, unit="bf16", nodes=2)


def decode_step(config: DeepseekV4Config, *, batch: int, context: int, rates: Rates = H200) -> Step:
    """The roof of a step in which each of `batch` requests of `context` tokens decodes one."""
    kernels = tuple(_step_kernels(config, batch, context))
    moved = sum(kernel.num_bytes for kernel in kernels) / rates.bandwidth
    computed = sum(rates.seconds(0.0, kernel.operations, kernel.unit) for kernel in kernels)
    serial = sum(max(rates.seconds(k.num_bytes, k.operations, k.unit), k.nodes * rates.node) for k in kernels)
    return Step(
        kernels=kernels, ideal=max(moved, computed), serial=serial, nodes=sum(kernel.nodes for kernel in kernels)
    )


def prefill_rate(
    config: DeepseekV4Config, *, tokens: int, cached: int = 0, expert_unit: Unit = "bf16", rates: Rates = H200
) -> float:
    """Tokens a second at the roof of a prefill of `tokens` behind `cached` ones; the head is left out.

    Args:
        config: The model.
        tokens: Of the chunk.
        cached: Tokens before it.
        expert_unit: Numbers in which the experts multiply: `bf16` for FP4 weights and bfloat16 inputs.
        rates: Of the device.
    """
    middle = cached + tokens / 2
    expert, seconds = _expert_parameters(config), 0.0
    for ratio in config.main_ratios:
        for part, count, size, unit in _matrices(config, ratio):
            moved = 20 * config.hidden_size * _BF16 * tokens if part == "hyper_connection" else 0.0
            seconds += rates.seconds(count * size + moved, 2 * count * tokens, unit)
        read = distinct_experts(config, tokens) * expert * _FP4
        seconds += rates.seconds(read, 2 * tokens * config.num_experts_per_tok * expert, expert_unit)
        lanes = config.num_attention_heads * config.head_dim
        seconds += rates.seconds(0.0, 4 * tokens * lanes * _keys(config, ratio, middle), "bf16")
        if ratio == 4:
            lanes = config.index_n_heads * config.index_head_dim
            seconds += rates.seconds(0.0, 2 * tokens * lanes * middle / 4, "fp8")
            seconds += rates.seconds(2 * tokens * middle / 4 * _FP32, 0.0, "bf16")
    return tokens / seconds


# ---- single kernels -------------------------------------------------------------------------------------------------


def sparse_attention_seconds(config: DeepseekV4Config, *, tokens: int, keys: int, rates: Rates = H200) -> float:
    """Roof of sparse decode attention: rows once for each token, queries and outputs."""
    lanes = config.num_attention_heads * config.head_dim
    return rates.seconds(tokens * (keys * _ROW + lanes * 2 * _BF16), 4 * tokens * lanes * keys, "bf16")


def index_logits_seconds(config: DeepseekV4Config, *, tokens: int, context: int, rates: Rates = H200) -> float:
    """Roof of the indexer's scores over all entries of a context."""
    entries = context // 4
    work = 2 * tokens * config.index_n_heads * config.index_head_dim * entries
    return rates.seconds(tokens * entries * (_KEY + _FP32), work, "fp8")


def gemm_seconds(*, rows: int, out_lanes: int, in_lanes: int, rates: Rates = H200) -> float:
    """Roof of an FP8 product of block-scaled weights with a bfloat16 result."""
    moved = out_lanes * in_lanes * _FP8 + rows * in_lanes + rows * out_lanes * _BF16
    return rates.seconds(moved, 2 * rows * out_lanes * in_lanes, "fp8")


# ---- table ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Prints the roofs of a model with as many of its layers as asked for."""
    parser = argparse.ArgumentParser(prog="./dev bench roofline", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="flash", help="released model")
    parser.add_argument("--layers", type=int, default=FLASH.num_hidden_layers, help="of its first layers")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--bandwidth", type=float, default=H200.bandwidth / 1e12, help="TB/s")
    parser.add_argument("--bf16", type=float, default=H200.bf16 / 1e12, help="TFLOP/s")
    parser.add_argument("--fp8", type=float, default=H200.fp8 / 1e12, help="TFLOP/s")
    options = parser.parse_args(list(arguments))
    rates = Rates(bandwidth=options.bandwidth * 1e12, bf16=options.bf16 * 1e12, fp8=options.fp8 * 1e12, node=H200.node)
    config = first_layers(preset(options.model), options.layers)
    size = totals(config)
    write = sys.stdout.write
    write(
        f"{options.model}, {config.num_hidden_layers} layers: {size.parameters / 1e9:.1f} B parameters, "
        f"{size.active / 1e9:.2f} B active, {size.resident_bytes / 1e9:.1f} GB\n\n"
        f"{'batch':>6} {'serial ms':>10} {'ideal ms':>9} {'nodes':>6} {'experts':>8}  largest parts, ms\n"
    )
    for batch in (1, 8, 32, 128, 256):
        step = decode_step(config, batch=batch, context=options.context, rates=rates)
        parts = sorted(step.by_part(rates).items(), key=lambda item: -item[1])[:4]
        shown = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts)
        experts = distinct_experts(config, batch)
        write(f"{batch:6d} {step.serial * 1e3:10.2f} {step.ideal * 1e3:9.2f} {step.nodes:6d} {experts:8.1f}  {shown}\n")
    rate = prefill_rate(config, tokens=8192, rates=rates)
    write(f"\nprefill of 8,192 tokens: {rate:,.0f} tokens/s\n")
    return 0
