"""Inputs of the routed experts. T tokens, E experts, K chosen for a token, D hidden lanes, I expert width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from halocline.backends_reference.case import (
    DTYPES,
    Case,
    Dialect,
    Size,
    call,
    dialect_of,
    generator,
    normal,
    stored_weight,
)
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops.moe import Routing

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["expert_cases"]

# Kernels change tiles with the number of tokens: each of these has been wrong in somebody's kernel.
_TOKEN_COUNTS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129)

Spread = Literal["even", "one_expert", "other_ranks"]


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The experts of one layer and what is asked of them.

    Attributes:
        name: What is special about it.
        weight: Stored format.
        tokens: Token counts, one call for each.
        experts: Experts held.
        chosen: Experts for each token.
        hidden: Lanes of a token.
        width: Lanes of an expert.
        dialect: Of FP8 codes.
        activation: Rounding of the inputs of both products.
        limit: SwiGLU clamp.
        spread: Who is chosen: anyone, one expert first of all, or partly experts of other ranks (id -1).
        std: Size of the inputs.
        size: Whether a CPU can afford it.
    """

    name: str
    weight: str
    tokens: tuple[int, ...] = (5,)
    experts: int = 8
    chosen: int = 3
    hidden: int = 64
    width: int = 128
    dialect: Dialect = "ocp"
    activation: Literal["none", "fp8_group128"] = "none"
    limit: float = 10.0
    spread: Spread = "even"
    std: float = 1.0
    size: Size = "small"

    def stored(self, gen: torch.Generator, out: int, lanes: int, device: str) -> Weight:
        """One matrix of every expert."""
        if self.size == "model":
            return _coded_weight(gen, self.experts, out, lanes, weight_format=self.weight, device=device)
        return stored_weight(
            gen, self.experts, out, lanes, weight_format=self.weight, device=device, dialect=self.dialect
        )

    def routing(self, gen: torch.Generator, tokens: int, device: str) -> Routing:
        """Distinct experts in any order, with weights that sum to 1.5."""
        order_TE = torch.rand(tokens, self.experts, generator=gen).argsort(dim=1)
        ids_TK = order_TE[:, : self.chosen].int()
        if self.spread == "one_expert":
            ids_TK[:, 0] = 0
            ids_TK[:, 1:] = 1 + torch.rand(tokens, self.experts - 1, generator=gen).argsort(dim=1)[:, 1 : self.chosen]
        if self.spread == "other_ranks":
            ids_TK[torch.rand(tokens, self.chosen, generator=gen) < 0.5] = -1
            ids_TK[:1] = -1
        weights_TK = torch.rand(tokens, self.chosen, generator=gen) + 0.1
        return Routing(ids_TK.to(device), (1.5 * weights_TK / weights_TK.sum(1, keepdim=True)).to(device))


def expert_cases() -> Iterator[Case]:
    """Every weight format at many token counts, uneven and foreign routing, both roundings, and released sizes."""
    for layer in _layers():
        for dtype in DTYPES:
            if layer.size == "small" or dtype == "bfloat16":
                yield _case(layer, dtype)


def _layers() -> Iterator[_Layer]:
    for weight in ("float32", "bfloat16", "mxfp4", "fp8_block", "nvfp4"):
        yield _Layer(name=f"{weight}_token_counts", weight=weight, tokens=_TOKEN_COUNTS)
        yield _Layer(name=f"{weight}_one_expert", weight=weight, tokens=(33,), spread="one_expert")
        yield _Layer(name=f"{weight}_other_ranks", weight=weight, tokens=(9,), spread="other_ranks")
        yield _Layer(name=f"{weight}_empty", weight=weight, tokens=(0,))
        yield _Layer(name=f"{weight}_no_limit", weight=weight, limit=0.0, std=4.0)
        yield _Layer(name=f"{weight}_tight_limit", weight=weight, limit=0.3)
        yield _Layer(name=f"{weight}_large_inputs", weight=weight, std=300.0)
    yield _Layer(name="fp8_block_fnuz", weight="fp8_block", dialect="fnuz")
    yield _Layer(name="smallest", weight="float32", tokens=(1,), experts=1, chosen=1, hidden=1, width=1)
    yield _Layer(name="mxfp4_smallest", weight="mxfp4", tokens=(1, 2), experts=2, chosen=1, hidden=32, width=32)
    for weight in ("mxfp4", "fp8_block", "nvfp4"):
        yield _Layer(
            name=f"{weight}_rounded_inputs", weight=weight, tokens=(1, 17, 65), hidden=256, activation="fp8_group128"
        )
    # Released widths with few experts, which is what a CPU can hold as float32.
    flash = _Layer(name="", weight="", hidden=4096, width=2048, chosen=6, size="model")
    for weight in ("mxfp4", "fp8_block", "nvfp4", "bfloat16"):
        yield replace(flash, name=f"{weight}_flash", weight=weight, tokens=(1, 3, 32, 200))
    for weight in ("mxfp4", "fp8_block", "nvfp4"):
        name = f"{weight}_flash_rounded_inputs"
        yield replace(flash, name=name, weight=weight, tokens=(1, 33), activation="fp8_group128")
    yield replace(flash, name="mxfp4_pro", weight="mxfp4", tokens=(2, 33), hidden=7168, width=3072)


def _coded_weight(gen: torch.Generator, *shape: int, weight_format: str, device: str) -> Weight:
    """A large stack made of random codes, which costs a fraction of rounding random numbers."""
    kind = WeightFormat(weight_format)
    if kind is WeightFormat.BFLOAT16:
        return stored_weight(gen, *shape, weight_format=weight_format, device=device)

    def codes(below: int, *sizes: int, start: int = 0) -> Tensor:
        return torch.randint(start, below, sizes, generator=gen, dtype=torch.uint8).to(device)

    *stack, out, lanes = shape
    if kind is WeightFormat.FP8_BLOCK:  # bytes below 0x7F are positive numbers; 0x7F is NaN
        data = codes(0x7F, *shape) | (codes(2, *shape) << 7)
        scale = codes(115, *stack, out // 128, lanes // 128, start=112)
        return Weight(data=data.view(torch.float8_e4m3fn), format=kind, shape=shape, scale=scale)
    data = codes(256, *stack, out, lanes // 2)
    if kind is WeightFormat.MXFP4:
        return Weight(data=data, format=kind, shape=shape, scale=codes(121, *stack, out, lanes // 32, start=118))
    scale = codes(0x40, *stack, out, lanes // 16, start=0x30).view(torch.float8_e4m3fn)
    return Weight(
        data=data, format=kind, shape=shape, scale=scale, global_scale=torch.full((*stack,), 2.0**-7, device=device)
    )


def _case(layer: _Layer, dtype: str) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(len(layer.name))
        gate_up = layer.stored(gen, 2 * layer.width, layer.hidden, device)
        down = layer.stored(gen, layer.hidden, layer.width, device)
        weights = ops.moe.prepare_experts(gate_up, down, activation=layer.activation)
        found: dict[str, Tensor] = {}
        for tokens in layer.tokens:
            x_TD = normal(gen, tokens, layer.hidden, dtype=DTYPES[dtype], std=layer.std).to(device)
            routing = layer.routing(gen, tokens, device)
            result = call(ops, "moe.experts", x_TD, routing, weights, limit=layer.limit)
            found.update({f"{name}.{tokens}": tensor for name, tensor in result.items()})
        return found

    return Case(
        op="moe.experts",
        name=layer.name,
        dtype=dtype,
        run=run,
        formats={"compute": dtype, "weight": layer.weight},
        semantics={
            "fp8_dialect": dialect_of(layer.weight, layer.dialect),
            "activation": layer.activation,
            "swiglu_clamp": "gate_above_up_both",
            "weight_before_down": "yes",
        },
        traits={
            "a2a": "none",
            "tp_size": 1,
            "num_experts": layer.experts,
            "num_chosen": layer.chosen,
            "hidden_size": layer.hidden,
            "expert_width": layer.width,
        },
        size=layer.size,
    )
