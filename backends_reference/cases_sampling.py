"""Inputs of the sampling op. R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import Case, generator, normal
from halocline.backends_reference.sampling import gumbel_noise, restrict
from halocline.hal.ops.sampling import SamplingBatch

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]

_UNDECIDED = -2
_NEAR = 1e-3

# temperature, top_k, top_p, min_p
_Settings = tuple[float, int, float, float]
_GREEDY: _Settings = (0.0, 0, 1.0, 0.0)
_PLAIN: _Settings = (1.0, 0, 1.0, 0.0)
_MIXED: tuple[_Settings, ...] = (
    _GREEDY,
    _PLAIN,
    (0.7, 40, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.6, 100, 0.95, 0.02),
    (1.0, 1, 1.0, 0.0),
    (100.0, 0, 1.0, 0.0),
)


def cases() -> Iterator[Case]:
    """Vocabularies of the release and small ones, each kind of restriction, rows that must fail."""
    yield _case("greedy", 3, 129280, (_GREEDY,))
    yield _case("plain", 4, 129280, (_PLAIN,))
    yield _case("restricted", 8, 129280, _MIXED)
    yield _case("small", 64, 1024, _MIXED)
    yield _case("odd_vocabulary", 16, 1021, _MIXED)
    yield _case("one_token", 2, 1, (_PLAIN, _GREEDY))
    yield _case("empty", 0, 1024, ())
    yield _case("flat", 8, 1024, _MIXED, std=0.0)
    yield _case("sharp", 8, 1024, _MIXED, std=30.0)
    yield _case("few_allowed", 8, 1024, _MIXED, num_allowed=2)
    yield _case("failed_rows", 8, 1024, _MIXED, fail=True)
    yield _case("late_counters", 8, 1024, _MIXED, first_count=2**32 - 4)


def _case(
    name: str,
    rows: int,
    vocabulary: int,
    settings: tuple[_Settings, ...],
    *,
    std: float = 3.0,
    num_allowed: int = 0,
    fail: bool = False,
    first_count: int = 0,
) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(rows * 131 + vocabulary)
        logits_RV = normal(gen, rows, vocabulary, std=std)
        if num_allowed:
            kept = torch.randint(vocabulary, (rows, num_allowed), generator=gen)
            logits_RV = torch.full_like(logits_RV, -torch.inf).scatter_(1, kept, logits_RV.gather(1, kept))
        if fail:
            logits_RV[0::3, vocabulary // 2] = torch.nan
            logits_RV[1::3] = -torch.inf
        seeds_R = torch.randint(-(2**62), 2**62, (rows,), generator=gen)
        batch = _batch(rows, settings, seeds_R, first_count, device)
        ids_R = ops.sampling.sample(logits_RV.to(device), batch).cpu()
        decided = [_is_decided(logits_RV[row], batch, row) for row in range(rows)]
        return {"ids": torch.where(torch.tensor(decided, dtype=torch.bool), ids_R, _UNDECIDED)}

    return Case(op="sampling.sample", name=name, dtype="float32", run=run, formats={})


def _batch(rows: int, settings: tuple[_Settings, ...], seeds_R: Tensor, first_count: int, device: str) -> SamplingBatch:
    chosen = [settings[row % len(settings)] for row in range(rows)]
    return SamplingBatch(
        temperature_R=torch.tensor([one[0] for one in chosen], dtype=torch.float32, device=device),
        top_k_R=torch.tensor([one[1] for one in chosen], dtype=torch.int32, device=device),
        top_p_R=torch.tensor([one[2] for one in chosen], dtype=torch.float32, device=device),
        min_p_R=torch.tensor([one[3] for one in chosen], dtype=torch.float32, device=device),
        seeds_R=seeds_R.to(device),
        counters_R=torch.arange(first_count, first_count + rows, dtype=torch.int64, device=device),
    )


def _is_decided(logits_V: Tensor, batch: SamplingBatch, row: int) -> bool:
    """Whether rounding cannot change the draw: the winner is clear, also with limits moved a little both ways.

    Kernels may round logarithms and sums differently, so two tokens of nearly one score are both right.
    """
    temperature = float(batch.temperature_R[row])
    if temperature == 0.0 or not bool(logits_V.max().isfinite()):
        return True
    noise_V = gumbel_noise(int(batch.seeds_R[row]), int(batch.counters_R[row]), logits_V.shape[0])
    winners = set()
    for factor in (1.0 - _NEAR, 1.0, 1.0 + _NEAR):
        top_p, min_p = float(batch.top_p_R[row]), float(batch.min_p_R[row])
        kept_V = restrict(
            logits_V,
            temperature=temperature,
            top_k=int(batch.top_k_R[row]),
            top_p=min(top_p * factor, 1.0) if top_p < 1.0 else 1.0,
            min_p=min_p * factor,
        )
        best = (kept_V + noise_V).topk(min(2, logits_V.shape[0]))
        if best.values.shape[0] > 1 and float(best.values[0] - best.values[1]) < _NEAR:
            return False
        winners.add(int(best.indices[0]))
    return len(winners) == 1
