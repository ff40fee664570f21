"""Inputs of the mixture of experts: routers, activation, experts. T tokens, E experts, K chosen, D hidden, I width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import DTYPES, Case, Size, call, generator, normal
from halocline.backends_reference.cases_moe_experts import expert_cases

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]

_SCORING = {"scoring": "sqrtsoftplus"}
_NEAR = 1e-3


def cases() -> Iterator[Case]:
    """Routers of both kinds, the shared expert's activation, and the routed experts."""
    for op in ("route_by_score", "route_by_hash"):
        yield _router(op, "one", 1, 8, 2)
        yield _router(op, "ragged", 33, 8, 3)
        yield _router(op, "odd_experts", 5, 13, 4)
        yield _router(op, "empty", 0, 8, 2)
        yield _router(op, "all_chosen", 3, 6, 6)
        yield _router(op, "equal_and_small", 3, 6, 6, level=-20.0)
        yield _router(op, "vanishing", 3, 6, 6, level=-200.0)
        yield _router(op, "large", 3, 6, 6, level=100.0)
        yield _router(op, "flash", 129, 256, 6)
        yield _router(op, "pro", 65, 384, 6)
    for dtype in DTYPES:
        yield _swiglu("one", dtype, (1, 2))
        yield _swiglu("ragged", dtype, (33, 2 * 48))
        yield _swiglu("odd_width", dtype, (5, 2 * 33))
        yield _swiglu("empty", dtype, (0, 64))
        yield _swiglu("tight_limit", dtype, (17, 128), limit=0.6)
        yield _swiglu("no_limit", dtype, (17, 128), limit=0.0)
        yield _swiglu("extremes", dtype, (17, 128), std=1e4)
        yield _swiglu("flash", dtype, (513, 2 * 2048), size="model")
        yield _swiglu("pro", dtype, (129, 2 * 3072), size="model")
    yield from expert_cases()


def _router(op: str, name: str, tokens: int, experts: int, chosen: int, *, level: float | None = None) -> Case:
    """A router; a level gives every expert the same logit, so all of them have to be chosen."""

    def by_score(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(experts)
        bias_E = torch.zeros(experts) if level is not None else normal(gen, experts, std=0.5)
        logits_TE = _decided_logits(gen, tokens, bias_E, chosen, level)
        return call(ops, "moe.route_by_score", logits_TE.to(device), bias_E.to(device), num_chosen=chosen, scale=1.5)

    def by_hash(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(experts)
        logits_TE = _decided_logits(gen, tokens, torch.zeros(experts), experts, level)
        kinds = (torch.int64, torch.int32) if tokens % 2 else (torch.int32, torch.int64)
        rows = [torch.randperm(experts, generator=gen)[:chosen] for _ in range(100)]
        table_VK = torch.stack(rows).to(kinds[0]).to(device)
        token_ids_T = torch.randint(100, (tokens,), generator=gen).to(kinds[1]).to(device)
        return call(ops, "moe.route_by_hash", logits_TE.to(device), token_ids_T, table_VK, scale=2.5)

    return Case(
        op=f"moe.{op}",
        name=name,
        dtype="float32",
        run={"route_by_score": by_score, "route_by_hash": by_hash}[op],
        formats={},
        semantics=_SCORING,
        traits={"num_experts": experts, "num_chosen": chosen},
    )


def _decided_logits(gen: torch.Generator, tokens: int, bias_E: Tensor, chosen: int, level: float | None) -> Tensor:
    """Logits whose last chosen expert leads the first refused one clearly, so that rounding cannot change the set."""
    experts = bias_E.shape[0]
    if level is not None:
        return torch.full((tokens, experts), level)
    logits_TE = normal(gen, 4 * tokens + 4, experts, std=2.0)
    if chosen < experts:
        scores_TE = torch.log1p(logits_TE.double().exp()).sqrt() + bias_E.double()
        ordered_TE = scores_TE.sort(dim=1, descending=True).values
        logits_TE = logits_TE[ordered_TE[:, chosen - 1] - ordered_TE[:, chosen] > _NEAR]
    assert logits_TE.shape[0] >= tokens
    return logits_TE[:tokens]


def _swiglu(
    name: str, dtype: str, shape: tuple[int, int], *, limit: float = 10.0, std: float = 8.0, size: Size = "small"
) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gate_up_TI2 = normal(generator(sum(shape)), *shape, dtype=DTYPES[dtype], std=std)
        return call(ops, "moe.swiglu", gate_up_TI2.to(device), limit=limit)

    return Case(
        op="moe.swiglu",
        name=name,
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics={"swiglu_clamp": "gate_above_up_both"},
        size=size,
    )
