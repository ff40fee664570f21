"""Sizes and kernel sets of a GPU session: the released models', and tiny ones that show on a CPU that parts run."""

from __future__ import annotations

from dataclasses import dataclass

from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.presets import FLASH, PRO, VENDOR_TINY

__all__ = ["FULL", "KERNEL_SETS", "TINY", "Sizes"]

_PORTABLE = ("*=triton",)

# What a run asks for on a GPU, by the name under which its rows are kept. `default` is what an operator gets.
KERNEL_SETS: dict[str, tuple[str, ...]] = {
    "default": (),
    "libraries": (
        *_PORTABLE,
        "attention.sparse_decode=flashmla",
        "attention.sparse_prefill=flashmla",
        "gemm.linear=deep_gemm",
        "attention.output=deep_gemm",
        "indexer.logits=deep_gemm",
        "moe.experts=triton_kernels",
    ),
    "portable": _PORTABLE,
    "tilelang": (*_PORTABLE, "attention.sparse_decode=tilelang", "attention.sparse_prefill=tilelang"),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the parts of a session measure.

    Attributes:
        flash: The smaller released model.
        pro: The larger one.
        graph: A narrow model with every kind of layer, for comparing graphs with eager steps.
        all_kinds: Compression ratios of four layers of all kinds.
        layers: Layers of timed models.
        deep_layers: As many layers as fit on one device.
        pro_layers: Layers of the larger model that fit.
        context: Tokens before a timed step, and of a timed prefill.
        batches: Batch sizes of timed steps.
        graph_positions: Longest context where graphs are compared.
        edges: Lengths at which windows, blocks and pages begin and end.
        replays: Replays compared.
        graph_sizes: Batch sizes that an engine captures.
        width_prompt: Tokens before the positions at which full-width layers are compared.
        width_positions: Positions compared.
        ready_lengths: Prompts after an engine is ready.
        ready_batches: Requests at a time after an engine is ready.
        peer_prompt: Tokens before the steps that are timed against a peer.
        two_model: A narrow model that two ranks can share in every mode.
        two_modes: Modes of two ranks.
        two_batches: Batch sizes of timed steps of two ranks, of the whole machine.
        rounds: Timed repetitions.
    """

    flash: DeepseekV4Config
    pro: DeepseekV4Config
    graph: DeepseekV4Config
    two_model: DeepseekV4Config
    all_kinds: tuple[int, ...] = (0, 0, 4, 128)
    layers: int = 8
    deep_layers: int = 36
    pro_layers: int = 4
    context: int = 8192
    batches: tuple[int, ...] = (1, 8, 32, 128)
    graph_positions: int = 65536
    edges: tuple[int, ...] = (1, 127, 128, 129, 511, 512, 513, 40_000)
    replays: int = 50
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    width_prompt: int = 576
    width_positions: int = 64
    ready_lengths: tuple[int, ...] = (17, 300, 2000)
    ready_batches: tuple[int, ...] = (1, 3, 17, 64, 128)
    peer_prompt: int = 512
    two_modes: tuple[str, ...] = ("tp", "tp-ep", "ep", "dp", "dp-sent")
    two_batches: tuple[int, ...] = (1, 32, 128)
    rounds: int = 20


_NARROW = FLASH.replace(
    num_hidden_layers=5,
    compress_ratios=(0, 0, 4, 128, 4),
    num_nextn_predict_layers=0,
    hidden_size=1024,
    n_routed_experts=16,
    moe_intermediate_size=512,
    vocab_size=4096,
)
FULL = Sizes(flash=FLASH, pro=PRO, graph=_NARROW, two_model=_NARROW)
TINY = Sizes(
    flash=VENDOR_TINY,
    pro=VENDOR_TINY.replace(num_attention_heads=8),
    graph=VENDOR_TINY.without_draft(),
    two_model=VENDOR_TINY.without_draft().replace(moe_intermediate_size=256),
    layers=3,
    deep_layers=4,
    pro_layers=2,
    context=256,
    batches=(1, 2),
    graph_positions=700,
    edges=(1, 127, 128, 129, 300, 511, 512, 513),
    replays=3,
    graph_sizes=(1, 2),
    width_prompt=140,
    width_positions=4,
    ready_lengths=(5, 140),
    ready_batches=(1, 3),
    peer_prompt=40,
    two_batches=(1, 2),
    rounds=3,
)
