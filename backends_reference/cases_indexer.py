"""Inputs of the indexer: queries, scores, selection. T tokens, H index heads, I index width, S entries."""

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
    rope_table,
)
from halocline.backends_reference.case_requests import Requests
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.ops.indexer import IndexQuery

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops
    from halocline.hal.ops.attention import AttentionPlan

__all__ = ["cases"]

Rounding = Literal["none", "fp4_group32", "fp8_row"]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of a ratio-4 layer.

    Attributes:
        name: What is special about it.
        fed: Tokens that each request has had.
        new: Tokens of this step.
        heads: Index heads.
        width: Index width.
        kept: Entries kept for a token.
        page_tokens: Tokens of a token page.
        padding: Rows of padding behind the step.
        part: Tokens that are scored and selected for, as a range; all when left out.
        size: Whether a CPU can afford it.
    """

    name: str
    fed: tuple[int, ...]
    new: tuple[int, ...]
    heads: int = 16
    width: int = 64
    kept: int = 8
    page_tokens: int = 128
    padding: int = 0
    part: tuple[int, int] | None = None
    size: Size = "small"

    @property
    def requests(self) -> Requests:
        """The requests of the step."""
        return Requests(
            lengths=tuple(a + b for a, b in zip(self.fed, self.new, strict=True)),
            page_tokens=self.page_tokens,
            index_topk=self.kept,
            start=min(self.fed),
        )

    def plan(self, ops: Ops, device: str) -> AttentionPlan:
        """The plan of the step."""
        batch = self.requests.batch(self.fed, self.new, padding=self.padding, device=device)
        return ops.attention.plan(batch, self.requests.geometry, "paged")

    @property
    def range(self) -> tuple[int, int]:
        """Tokens that are worked on."""
        return self.part or (0, sum(self.new) + self.padding)

    @property
    def traits(self) -> dict[str, int | str]:
        """What kernels may restrict."""
        return {"index_heads": self.heads, "index_width": self.width, "index_topk": self.kept}


_STEPS = (
    _Step(name="one_token", fed=(3,), new=(1,)),
    _Step(name="no_block", fed=(0, 2), new=(1, 1)),
    _Step(name="decode", fed=(3, 30, 127, 200, 0), new=(1,) * 5),
    _Step(name="prefill", fed=(0,), new=(70,)),
    _Step(name="mixed", fed=(300, 5, 0), new=(1, 40, 3)),
    _Step(name="padded", fed=(40, 3), new=(1, 2), padding=5),
    _Step(name="part", fed=(300, 5, 0), new=(1, 40, 3), part=(7, 30)),
    _Step(name="empty", fed=(40,), new=(0,)),
    _Step(name="as_many_as_kept", fed=(31, 32, 35, 36), new=(1,) * 4),
    _Step(name="more_tokens_than_heads", fed=tuple(range(0, 132, 4)), new=(1,) * 33),
    _Step(name="pages_of_64", fed=(900, 100), new=(1, 3), page_tokens=256, heads=32, width=128),
    _Step(name="pages_of_256", fed=(2100, 100), new=(1, 3), page_tokens=1024, heads=32, width=128, kept=64),
    _Step(name="late", fed=(65_600,), new=(1,), page_tokens=1024, kept=64),
)
_RELEASED = _Step(name="", fed=(), new=(), heads=64, width=128, page_tokens=256, kept=512, size="model")
_MODEL = (
    replace(_RELEASED, name="flash_decode", fed=tuple(range(0, 12_800, 100)), new=(1,) * 128),
    replace(_RELEASED, name="flash_prefill", fed=(3000,), new=(515,)),
    replace(_RELEASED, name="flash_long", fed=(65_600, 10), new=(1, 1)),
    replace(
        _RELEASED,
        name="flash_256_requests",
        fed=(0, 1, 126, 127, 128, 8191, 65_535, *range(0, 1992, 8)),
        new=(1,) * 256,
    ),
    replace(_RELEASED, name="pro_decode", fed=tuple(range(0, 33_000, 1000)), new=(1,) * 33, kept=1024),
)
# Element type of the query, its rounding and the format of the keys, as the three numeric recipes pair them.
_RECIPES: tuple[tuple[str, Rounding, str], ...] = (
    ("float32", "none", "float32"),
    ("bfloat16", "none", "bfloat16"),
    ("bfloat16", "fp4_group32", "fp4_group32"),
    ("bfloat16", "fp8_row", "fp8_row"),
)


def cases() -> Iterator[Case]:
    """Each step in each recipe, then selections from scores in every state."""
    for step in (*_STEPS, *_MODEL):
        for dtype, rounding, keys in _RECIPES:
            if step.size == "small" or rounding != "none":
                yield _prepare_query(step, dtype, rounding)
                yield _logits(step, dtype, keys)
        if step.name == "decode":
            yield _prepare_query(step, "bfloat16", "fp8_row", "fnuz")
            yield _logits(step, "bfloat16", "fp8_row", "fnuz")
        for scores in ("distinct", "infinite", "negative"):
            yield _select(step, scores)


def _prepare_query(step: _Step, dtype: str, rounding: Rounding, dialect: Dialect = "ocp") -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(step.heads)
        num_tokens = sum(step.new)
        padding = torch.full((step.padding, step.heads, step.width + 1), torch.nan)
        projected_THJ = torch.cat((normal(gen, num_tokens, step.heads, step.width + 1), padding)).to(DTYPES[dtype])
        rope = rope_table(max(step.requests.lengths), 64, device)
        q_THI, weights_TH = projected_THJ[..., :-1].contiguous().to(device), projected_THJ[..., -1].to(device)
        plan = step.plan(ops, device)
        return call(ops, "indexer.prepare_query", plan, q_THI, weights_TH, rope, rounding=rounding)

    return Case(
        op="indexer.prepare_query",
        name=f"{rounding}_{step.name}" if dialect == "ocp" else f"{rounding}_fnuz_{step.name}",
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics={
            "rope_pairing": "adjacent",
            "index_query": rounding,
            "fp8_dialect": dialect_of(rounding, dialect),
        },
        traits=step.traits,
        size=step.size,
    )


def _logits(step: _Step, dtype: str, keys: str, dialect: Dialect = "ocp") -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen, requests = generator(step.width), step.requests
        layout = cache_layout(
            "index_key",
            RowFormat(keys),
            width=step.width,
            rope_width=0,
            page_rows=step.page_tokens // 4,
            fp8_dialect=dialect,
        )
        cache = ops.kv_cache.allocate(layout, requests.num_token_pages, device=device)
        num_rows = requests.num_token_pages * layout.page_rows
        slots_N = torch.arange(num_rows, dtype=torch.int64).to(device)
        ops.kv_cache.write_rows(cache, slots_N, normal(gen, num_rows, step.width).to(device))
        start, stop = step.range
        # Queries of the served recipe are E4M3 codes whose scale lies in the weights.
        codes = torch.float8_e4m3fn if dialect == "ocp" else torch.float8_e4m3fnuz
        kind = codes if keys == "fp8_row" else DTYPES[dtype]
        q_THI = normal(gen, stop - start, step.heads, step.width).to(kind)
        weights_TH = normal(gen, stop - start, step.heads, std=(step.width * step.heads) ** -0.5)
        query = IndexQuery(q_THI.to(device), weights_TH.to(device))
        return call(ops, "indexer.logits", step.plan(ops, device), query, cache, first_token=start)

    return Case(
        op="indexer.logits",
        name=f"{keys}_{step.name}" if dialect == "ocp" else f"{keys}_fnuz_{step.name}",
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics={"cache_format": keys, "fp8_dialect": dialect_of(keys, dialect)},
        traits=step.traits,
        size=step.size,
    )


def _select(step: _Step, scores: str) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen, (start, stop) = generator(len(step.name)), step.range
        plan = step.plan(ops, device)
        visible_T = plan.visible[4][start:stop].cpu()
        num_entries = max(plan.batch.max_seqlen // 4, 1)
        # A permutation of distinct numbers: no two entries tie, so the set is decided.
        order_TS = torch.rand(stop - start, num_entries, generator=gen).argsort(dim=1)
        logits_TS = (order_TS - num_entries * (scores == "negative")).float()
        if scores == "infinite":  # fewer finite scores than are kept: a filler must not win against the others
            logits_TS[order_TS < num_entries - 3] = -torch.inf
            logits_TS[visible_T > step.kept] = order_TS[visible_T > step.kept].float()
        behind_TS = torch.arange(num_entries) >= visible_T[:, None]
        logits_TS = logits_TS.masked_fill(behind_TS, torch.nan if step.padding else 1e9)
        wide_TS = torch.cat((logits_TS, torch.full((stop - start, 3), 1e9)), dim=1).to(device)
        return call(
            ops,
            "indexer.select",
            plan,
            wide_TS[:, :num_entries],
            first_token=start,
            num_kept=step.kept,
            page_rows=step.page_tokens // 4,
        )

    return Case(
        op="indexer.select",
        name=f"{scores}_{step.name}",
        dtype="float32",
        run=run,
        formats={},
        traits=step.traits,
        size=step.size,
    )
