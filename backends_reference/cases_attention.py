"""Inputs of the attention ops: plan, query preparation, sparse attention, output. T tokens, H heads, D head width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    rope_table,
    stored_weight,
)
from halocline.backends_reference.case_requests import Requests
from halocline.backends_reference.cases_attention_plan import plan_cases
from halocline.backends_reference.cases_attention_rows import row_cases

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]

_ADJACENT = {"rope_pairing": "adjacent"}


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """The heads of one network and the tokens of one step.

    Attributes:
        name: What is special about it.
        fed: Tokens that each request has had.
        new: Tokens of this step.
        heads: Query heads.
        width: Lanes of a head.
        rope: Rotary lanes at its end.
        groups: Groups of the output projection.
        group_rank: Lanes that each group is projected to.
        padding: Rows of padding behind the step.
        spread: Whether tokens differ in size by many orders, one of zeros among them.
        size: Whether a CPU can afford it.
    """

    name: str
    fed: tuple[int, ...] = (0, 5, 200)
    new: tuple[int, ...] = (3, 1, 7)
    heads: int = 4
    width: int = 128
    rope: int = 64
    groups: int = 2
    group_rank: int = 16
    padding: int = 0
    spread: bool = False
    size: Size = "small"

    @property
    def requests(self) -> Requests:
        """The requests of the step."""
        lengths = tuple(a + b for a, b in zip(self.fed, self.new, strict=True))
        return Requests(lengths=lengths, start=min(self.fed))

    @property
    def traits(self) -> dict[str, int | str]:
        """What kernels may restrict."""
        return {"num_heads": self.heads, "head_dim": self.width, "tp_size": 1, "num_groups": self.groups}

    def rows(self, gen: torch.Generator, dtype: str, device: str) -> Tensor:
        """(tokens, heads, width), padding included; rows of padding hold NaN, which must not reach another row."""
        num_tokens = sum(self.new)
        rows_THD = normal(gen, num_tokens, self.heads, self.width)
        if self.spread:
            rows_THD = rows_THD * torch.logspace(-12, 12, num_tokens)[:, None, None]
            rows_THD[0] = 0.0
        padding = torch.full((self.padding, self.heads, self.width), torch.nan)
        return torch.cat((rows_THD, padding)).to(DTYPES[dtype]).to(device)


_STEPS = (
    _Heads(name="one_token", fed=(0,), new=(1,), heads=1, groups=1),
    _Heads(name="smallest", fed=(2,), new=(1,), heads=1, width=8, rope=4, groups=1, group_rank=1),
    _Heads(name="ragged"),
    _Heads(name="padded", padding=5),
    _Heads(name="empty", fed=(4,), new=(0,)),
    _Heads(name="more_tokens_than_heads", fed=(0,) * 33, new=(1,) * 33, heads=2),
    _Heads(name="all_lanes_rotated", width=64),
    _Heads(name="late", fed=(66_000,), new=(3,)),
    _Heads(name="extremes", new=(3, 1, 5), spread=True),
    _Heads(name="wide_heads", width=512, group_rank=128),
    _Heads(
        name="flash_decode",
        fed=(900,) * 32,
        new=(1,) * 32,
        heads=64,
        width=512,
        groups=8,
        group_rank=1024,
        size="model",
    ),
    _Heads(name="flash_prefill", fed=(77,), new=(513,), heads=64, width=512, groups=8, group_rank=1024, size="model"),
    _Heads(name="pro", fed=(900,) * 5, new=(1,) * 5, heads=128, width=512, groups=16, group_rank=1024, size="model"),
)


def cases() -> Iterator[Case]:
    """Plans, queries, both kinds of sparse attention, and the output projection in every format it is stored in."""
    yield from plan_cases()
    for step in _STEPS:
        for dtype in DTYPES:
            yield _prepare_query(step, dtype)
    yield from row_cases()
    for step in _STEPS:
        for dtype in DTYPES:
            for weight in ("float32", "bfloat16", "fp8_block"):
                if step.size == "small" or (weight == "fp8_block" and dtype == "bfloat16"):
                    yield _output(step, dtype, weight)
    yield _output(_STEPS[2], "bfloat16", "fp8_block", "fnuz")


def _prepare_query(step: _Heads, dtype: str) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        batch = step.requests.batch(step.fed, step.new, padding=step.padding, device=device)
        plan = ops.attention.plan(batch, step.requests.geometry, "paged")
        q_THD = step.rows(generator(step.heads), dtype, device)
        rope = rope_table(max(step.requests.lengths), step.rope, device)
        return call(ops, "attention.prepare_query", plan, q_THD, rope, eps=1e-6)

    return Case(
        op="attention.prepare_query",
        name=step.name,
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics=_ADJACENT,
        traits=step.traits,
        size=step.size,
    )


def _output(step: _Heads, dtype: str, weight: str, dialect: Dialect = "ocp") -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(step.heads)
        batch = step.requests.batch(step.fed, step.new, padding=step.padding, device=device)
        plan = ops.attention.plan(batch, step.requests.geometry, "paged")
        out_THD = step.rows(gen, dtype, device)
        shape = (step.groups * step.group_rank, step.heads // step.groups * step.width)
        wo_a = ops.attention.prepare_output(
            stored_weight(gen, *shape, weight_format=weight, device=device, dialect=dialect), activation="none"
        )
        rope = rope_table(max(step.requests.lengths), step.rope, device)
        return call(ops, "attention.output", plan, out_THD, rope, wo_a, num_groups=step.groups)

    return Case(
        op="attention.output",
        name=f"{weight}_{step.name}" if dialect == "ocp" else f"{weight}_fnuz_{step.name}",
        dtype=dtype,
        run=run,
        formats={"compute": dtype, "weight": weight},
        semantics={**_ADJACENT, "fp8_dialect": dialect_of(weight, dialect)},
        traits=step.traits,
        size=step.size,
    )
