"""Inputs of the compressors: requests fed over several steps. T tokens, C projected lanes, D lanes of an entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]


@dataclass(frozen=True, kw_only=True)
class _Feed:
    """Requests fed over steps.

    Attributes:
        name: What is special about it.
        steps: Tokens that each request brings in each step.
        start: Position of each request's first token; rows before it stand in the state already.
        page_tokens: Tokens of a token page.
        extra_rows: Ring rows beyond what is needed.
        padding: Rows of padding behind each step, which hold NaN.
        std: Size of the scores.
        size: Whether a CPU can afford it.
    """

    name: str
    steps: tuple[tuple[int, ...], ...]
    start: int = 0
    page_tokens: int = 128
    extra_rows: int = 0
    padding: int = 0
    std: float = 1.0
    size: Size = "small"

    @property
    def requests(self) -> Requests:
        """The requests, at the lengths that they reach."""
        totals = [sum(counts) for counts in zip(*self.steps, strict=True)]
        return Requests(
            lengths=tuple(self.start + total for total in totals),
            page_tokens=self.page_tokens,
            start=self.start,
            entries_from=self.start,
        )


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What a compressor makes: latents of a layer, or index keys."""

    kind: Literal["latent", "index_key"]
    ratio: int
    stored: str
    width: int
    rope: int = 64
    dialect: Dialect = "ocp"

    @property
    def lanes(self) -> int:
        """Projected lanes of a token."""
        return self.width * (2 if self.ratio == 4 else 1)


_FEEDS_OF_4 = (
    _Feed(name="first_block", steps=((4,),)),
    _Feed(name="no_block", steps=((3,),)),
    _Feed(name="one_prefill", steps=((41,),)),
    _Feed(name="single_steps", steps=((1,),) * 13),
    _Feed(name="odd_chunks", steps=((7,), (1,), (2,), (9,), (3,))),
    _Feed(name="requests", steps=((3, 8, 1), (1, 1, 130), (6, 0, 1), (0, 1, 2))),
    _Feed(name="padded", steps=((3, 8), (1, 1)), padding=5),
    _Feed(name="drafts", steps=((5, 6), (3, 3), (3, 3)), extra_rows=3),
    _Feed(name="sharp_scores", steps=((9,), (7,)), std=60.0),
    _Feed(name="late", steps=((2, 5), (6, 1)), start=65_533, page_tokens=1024),
    _Feed(name="pages_of_64", steps=((140,), (130,)), page_tokens=256),
    _Feed(name="pages_of_256", steps=((40,), (3,)), page_tokens=1024),
    _Feed(name="empty", steps=((0,),), start=5),
)
_FEEDS_OF_128 = (
    _Feed(name="first_block", steps=((128,),)),
    _Feed(name="no_block", steps=((127,),)),
    _Feed(name="one_prefill", steps=((300,),)),
    _Feed(name="over_the_boundary", steps=((126,), (1,), (1,), (1,))),
    _Feed(name="odd_chunks", steps=((7,), (100,), (60,), (128,), (3,))),
    _Feed(name="requests", steps=((127, 3, 256), (1, 126, 1), (130, 0, 129))),
    _Feed(name="padded", steps=((120, 8), (9, 130)), padding=5),
    _Feed(name="drafts", steps=((125, 128), (3, 3), (3, 3)), extra_rows=3),
    _Feed(name="sharp_scores", steps=((130,), (130,)), std=60.0),
    _Feed(name="late", steps=((2, 200),), start=65_535, page_tokens=1024),
    _Feed(name="pages_of_2", steps=((300,), (90,)), page_tokens=256),
    _Feed(name="empty", steps=((0,),), start=5),
)
_MODEL_FEEDS = (
    _Feed(name="released_decode", steps=((255,) * 8, (1,) * 8, (1,) * 8), page_tokens=256, size="model"),
    _Feed(name="released_prefill", steps=((1025, 77), (1023, 300)), page_tokens=256, size="model"),
)
_SMALL_TARGETS = (
    _Target(kind="latent", ratio=4, stored="float32", width=128),
    _Target(kind="latent", ratio=4, stored="bfloat16", width=128),
    _Target(kind="latent", ratio=4, stored="fp8_block64", width=128),
    _Target(kind="latent", ratio=128, stored="float32", width=128),
    _Target(kind="latent", ratio=128, stored="bfloat16", width=128),
    _Target(kind="latent", ratio=128, stored="fp8_block64", width=128),
    _Target(kind="index_key", ratio=4, stored="float32", width=64),
    _Target(kind="index_key", ratio=4, stored="bfloat16", width=128),
    _Target(kind="index_key", ratio=4, stored="fp8_row", width=128),
    _Target(kind="index_key", ratio=4, stored="fp4_group32", width=128),
)
_FNUZ_TARGETS = (
    _Target(kind="latent", ratio=4, stored="fp8_block64", width=128, dialect="fnuz"),
    _Target(kind="latent", ratio=128, stored="fp8_block64", width=128, dialect="fnuz"),
    _Target(kind="index_key", ratio=4, stored="fp8_row", width=128, dialect="fnuz"),
)
_MODEL_TARGETS = (
    _Target(kind="latent", ratio=4, stored="fp8_block64", width=512),
    _Target(kind="latent", ratio=128, stored="fp8_block64", width=512),
    _Target(kind="index_key", ratio=4, stored="fp8_row", width=128),
    _Target(kind="index_key", ratio=4, stored="fp4_group32", width=128),
)


def cases() -> Iterator[Case]:
    """States of both ratios; feeds of any chunking into latents and index keys of every format."""
    for ratio, lanes in ((4, 256), (4, 1024), (128, 128), (128, 512)):
        for extra_rows in (0, 3):
            yield _allocate(ratio, lanes, extra_rows)
    for target in _SMALL_TARGETS:
        for feed in _FEEDS_OF_4 if target.ratio == 4 else _FEEDS_OF_128:
            yield _insert(target, feed)
    for target in _FNUZ_TARGETS:
        yield _insert(target, _FEEDS_OF_4[5] if target.ratio == 4 else _FEEDS_OF_128[5])
    for target in _MODEL_TARGETS:
        for feed in _MODEL_FEEDS:
            yield _insert(target, feed)


def _allocate(ratio: int, lanes: int, extra_rows: int) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        state = ops.compressor.allocate_state(3, lanes, ratio=ratio, extra_rows=extra_rows, device=device)
        return {"shape": torch.tensor(state.rows_SB2C.shape), "bytes": torch.tensor(state.rows_SB2C.nbytes)}

    return Case(
        op="compressor.allocate_state",
        name=f"ratio_{ratio}_{lanes}_lanes_{extra_rows}_extra",
        dtype="float32",
        run=run,
        formats={},
        traits={"ratio": ratio},
    )


def _insert(target: _Target, feed: _Feed) -> Case:
    dtype = "float32" if target.stored == "float32" else "bfloat16"
    stored = target.stored if target.dialect == "ocp" else f"{target.stored}_fnuz"
    requests = feed.requests

    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(target.width + target.ratio)
        layout = cache_layout(
            target.kind,
            RowFormat(target.stored),
            width=target.width,
            rope_width=target.rope if target.kind == "latent" else 0,
            page_rows=feed.page_tokens // target.ratio,
            fp8_dialect=target.dialect,
        )
        cache = ops.kv_cache.allocate(layout, requests.num_token_pages, device=device)
        state = ops.compressor.allocate_state(
            requests.num_slots, target.lanes, ratio=target.ratio, extra_rows=feed.extra_rows, device=device
        )
        # A slot that was not fed may hold anything; one that was holds what earlier steps left.
        earlier = normal(gen, *state.rows_SB2C.shape) if feed.start else torch.full(state.rows_SB2C.shape, torch.nan)
        state.rows_SB2C.copy_(earlier)
        fixed = (
            normal(gen, target.ratio, target.lanes).to(device),
            (1 + normal(gen, target.width, std=0.2)).to(DTYPES[dtype]).to(device),
            rope_table(max(requests.lengths), target.rope, device),
        )
        fed, found = (feed.start,) * len(requests.lengths), {}
        for new in feed.steps:
            batch = requests.batch(fed, new, padding=feed.padding, device=device)
            plan = ops.attention.plan(batch, requests.geometry, "paged")
            padding = torch.full((feed.padding, 2 * target.lanes), torch.nan)
            projected_T2C = torch.cat((normal(gen, sum(new), 2 * target.lanes), padding))
            values_TC, scores_TC = projected_T2C.to(device).chunk(2, dim=1)
            found = call(
                ops, "compressor.insert", plan, values_TC, feed.std * scores_TC, *fixed, state, cache, eps=1e-6
            )
            fed = tuple(a + b for a, b in zip(fed, new, strict=True))
        return found

    return Case(
        op="compressor.insert",
        name=f"{target.kind}_{stored}_ratio_{target.ratio}_{feed.name}",
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics={
            "rope_pairing": "adjacent",
            "cache_format": target.stored,
            "fp8_dialect": dialect_of(target.stored, target.dialect),
        },
        traits={"ratio": target.ratio},
        size=feed.size,
    )
