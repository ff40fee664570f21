"""Inputs of sparse attention over window and compressed rows. T tokens, H heads, D head width, K rows, N cache rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import DTYPES, Case, Dialect, Size, call, dialect_of, generator, normal
from halocline.backends_reference.case_requests import Requests
from halocline.backends_reference.plan import plan_reference, slots_of_positions
from halocline.hal.formats import CacheLayout, RowFormat, cache_layout
from halocline.hal.ops.attention import AttentionPlan, RowSelection

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops
    from halocline.hal.ops.kv_cache import CacheHandle

__all__ = ["row_cases"]

# Element type of the query and format of the rows, as the three numeric recipes and a plain bfloat16 cache pair them.
_STORED = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8_block64"))
_IN_FNUZ_TOO = ("ratio_4", "dirty", "wide")


@dataclass(frozen=True, kw_only=True)
class _Queries:
    """Queries of one step and the rows that they see.

    Attributes:
        name: What is special about it.
        fed: Tokens that each request has had.
        new: Tokens of this step.
        ratio: Of the layer: 0 for the window alone.
        heads: Query heads.
        width: Lanes of a head and of a row.
        window: Positions seen directly.
        topk: Entries kept in a ratio-4 layer.
        window_page_rows: Rows of a window page.
        page_tokens: Tokens of a token page.
        padding: Rows of padding behind the step.
        holes: Share of selected slots that are -1 instead.
        blind: Token whose slots are all -1.
        dirty: Whether NaN stands in every row that nobody selects, and slots of such rows behind the lengths.
        part: Tokens of the step that are asked for, as a range; all when left out.
        sinks: Sinks of the heads; random when left out.
        std: Size of the queries.
        size: Whether a CPU can afford it.
    """

    name: str
    fed: tuple[int, ...]
    new: tuple[int, ...]
    ratio: int = 0
    heads: int = 4
    width: int = 128
    window: int = 24
    topk: int = 8
    window_page_rows: int = 8
    page_tokens: int = 128
    padding: int = 0
    holes: float = 0.0
    blind: int = -1
    dirty: bool = False
    part: tuple[int, int] | None = None
    sinks: tuple[float, ...] = ()
    std: float = 1.0
    size: Size = "small"

    @property
    def requests(self) -> Requests:
        """The requests of the step."""
        return Requests(
            lengths=tuple(a + b for a, b in zip(self.fed, self.new, strict=True)),
            window=self.window,
            window_page_rows=self.window_page_rows,
            page_tokens=self.page_tokens,
            index_topk=self.topk,
            start=min(self.fed),
        )


_INF = float("inf")
_MANY = (5, 30, 0, 128, 23, 24, 300)
_SMALL = (
    _Queries(name="one_token", fed=(0,), new=(1,), heads=1),
    _Queries(name="window", fed=_MANY, new=(1,) * 7),
    _Queries(name="ratio_4", fed=_MANY, new=(1,) * 7, ratio=4),
    _Queries(name="ratio_128", fed=_MANY, new=(1,) * 7, ratio=128),
    _Queries(name="several_tokens", fed=(40, 2, 300), new=(2, 2, 5), ratio=4),
    _Queries(name="no_closed_block", fed=(0, 1, 2), new=(1, 1, 1), ratio=4),
    _Queries(name="as_many_as_kept", fed=(31, 32, 35, 36), new=(1,) * 4, ratio=4),
    _Queries(name="more_tokens_than_heads", fed=tuple(range(0, 132, 4)), new=(1,) * 33, ratio=4, heads=2),
    _Queries(name="holes", fed=_MANY, new=(1,) * 7, ratio=4, holes=0.4, blind=3),
    _Queries(name="dirty", fed=_MANY, new=(1,) * 7, ratio=4, holes=0.2, dirty=True),
    _Queries(name="dirty_ratio_128", fed=(300, 511, 0), new=(1,) * 3, ratio=128, dirty=True),
    _Queries(name="padded", fed=(40, 300), new=(1, 2), ratio=4, padding=5, dirty=True),
    _Queries(name="part", fed=(40, 300, 0), new=(1, 1, 9), ratio=128, part=(1, 6)),
    _Queries(name="empty", fed=(40,), new=(0,), ratio=4),
    _Queries(name="sinks", fed=(40, 0, 130), new=(1, 1, 1), ratio=4, sinks=(-_INF, _INF, 40.0, -40.0)),
    _Queries(name="large_scores", fed=(40, 0, 130), new=(1, 1, 1), ratio=4, std=100.0),
    _Queries(name="pages_of_2", fed=(50, 300), new=(1, 3), ratio=128, window_page_rows=2, page_tokens=256),
    _Queries(name="pages_of_64", fed=(200, 900), new=(1, 3), ratio=4, window_page_rows=64, page_tokens=256),
    _Queries(name="pages_of_256", fed=(500, 2100), new=(1, 3), ratio=4, window_page_rows=256, page_tokens=1024),
    _Queries(name="odd_heads", fed=(40, 300), new=(1, 1), ratio=4, heads=5),
    _Queries(name="wide", fed=(40, 700), new=(1, 1), ratio=4, heads=3, width=512, topk=64, window=128),
)  # fmt: skip
_PAGES = 256
_RELEASED = _Queries(
    name="", fed=(), new=(), heads=64, width=512, window=128, window_page_rows=_PAGES, page_tokens=_PAGES, topk=512,
    size="model",
)  # fmt: skip
_RAGGED = tuple(range(0, 6400, 200))
_FAR = (0, 1, 126, 127, 128, 8191, 65_535, *range(0, 1992, 8))  # 256 requests that reach 1 to 65,536 tokens
_MODEL = (
    replace(_RELEASED, name="flash_window", fed=(3000,) * 128, new=(1,) * 128),
    replace(_RELEASED, name="flash_ratio_4", fed=_RAGGED, new=(1,) * 32, ratio=4),
    replace(_RELEASED, name="flash_ratio_128", fed=_RAGGED, new=(1,) * 32, ratio=128),
    replace(_RELEASED, name="flash_one", fed=(65_600,), new=(1,), ratio=4),
    replace(_RELEASED, name="flash_long", fed=(65_600, 1), new=(1, 1), ratio=128),
    replace(_RELEASED, name="flash_drafts", fed=(900,) * 16, new=(2,) * 16, ratio=4, holes=0.1),
    replace(_RELEASED, name="flash_rank_of_8", fed=(900,) * 130, new=(1,) * 130, heads=8, ratio=4, dirty=True),
    replace(_RELEASED, name="flash_chunk", fed=(300, 0), new=(400, 213), ratio=4),
    replace(_RELEASED, name="flash_256_requests", fed=_FAR, new=(1,) * 256, ratio=4, holes=0.05),
    replace(_RELEASED, name="flash_256_requests_ratio_128", fed=_FAR, new=(1,) * 256, ratio=128),
    replace(_RELEASED, name="pro_256_requests", fed=_FAR, new=(1,) * 256, heads=128, ratio=4, topk=1024),
    replace(
        _RELEASED, name="pro_ratio_4", fed=tuple(range(0, 9000, 900)), new=(1,) * 10, heads=128, ratio=4, topk=1024
    ),
    replace(_RELEASED, name="pro_ratio_128", fed=tuple(range(0, 9000, 900)), new=(1,) * 10, heads=128, ratio=128),
)


def row_cases() -> Iterator[Case]:
    """Every set of queries in every pair of element type and row format, for decode and for prefill."""
    for queries in (*_SMALL, *_MODEL):
        for dtype, stored in _STORED:
            if queries.size == "small" or stored == "fp8_block64":
                yield _case("sparse_decode", queries, dtype, stored)
                yield _case("sparse_prefill", queries, dtype, stored)
        if queries.name in _IN_FNUZ_TOO:
            yield _case("sparse_decode", queries, "bfloat16", "fp8_block64", "fnuz")
            yield _case("sparse_prefill", queries, "bfloat16", "fp8_block64", "fnuz")


def _case(op: str, queries: _Queries, dtype: str, stored: str, dialect: Dialect = "ocp") -> Case:
    decodes = op == "sparse_decode"

    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        requests, gen = queries.requests, generator(queries.heads)
        step = {"num_decode": len(queries.new) if decodes else 0, "padding": queries.padding}
        known = plan_reference(
            requests.batch(queries.fed, queries.new, **step, device="cpu"), requests.geometry, "paged"
        )
        batch = requests.batch(queries.fed, queries.new, **step, device=device)
        plan = ops.attention.plan(batch, requests.geometry, "paged" if decodes else "ragged")
        start, stop = queries.part or (0, batch.positions_T.shape[0])
        q_THD = normal(gen, batch.positions_T.shape[0], queries.heads, queries.width, std=queries.std)
        arguments: list[object] = [plan, q_THD.to(DTYPES[dtype]).to(device)[start:stop]]
        for selection, pages, page_rows in _selections(queries, known, gen):
            cache, rows = None, None
            if selection is not None:
                cache = _cache(
                    ops, queries, _layout(queries, stored, dialect, page_rows), pages, selection, gen, device
                )
                rows = _with_what_is_behind(queries, selection, pages * page_rows, gen, device).rows(start, stop)
            arguments += [cache, rows]
        sink_H = torch.tensor(queries.sinks) if queries.sinks else normal(gen, queries.heads, std=2.0)
        return call(ops, f"attention.{op}", *arguments, sink_H.to(device), scale=queries.width**-0.5)

    return Case(
        op=f"attention.{op}",
        name=f"{stored}_{queries.name}" if dialect == "ocp" else f"{stored}_fnuz_{queries.name}",
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics={
            "sink": "denominator",
            "cache_format": stored,
            "fp8_dialect": dialect_of(stored, dialect),
        },
        traits={
            "num_heads": queries.heads,
            "head_dim": queries.width,
            "tp_size": 1,
            **({} if decodes else {"prefill_layout": "ragged"}),
        },
        size=queries.size,
    )


def _selections(
    queries: _Queries, plan: AttentionPlan, gen: torch.Generator
) -> Iterator[tuple[RowSelection | None, int, int]]:
    """Rows, pages and rows of a page: of the window, then of the compressed cache (no rows in a ratio-0 layer)."""
    requests = queries.requests
    yield _with_holes(queries, plan.window_rows, gen), requests.num_window_pages, requests.window_page_rows
    page_rows = requests.page_tokens // (queries.ratio or 4)
    if queries.ratio == 0:
        yield None, requests.num_token_pages, page_rows
    elif queries.ratio == 128:
        yield _with_holes(queries, plan.all_rows[128], gen), requests.num_token_pages, page_rows
    else:
        yield _with_holes(queries, _picked(queries, plan, gen), gen), requests.num_token_pages, page_rows


def _picked(queries: _Queries, plan: AttentionPlan, gen: torch.Generator) -> RowSelection:
    """At most `topk` of the closed blocks of each token, in any order."""
    visible_T = plan.visible[4]
    entries_TK = torch.full((visible_T.shape[0], queries.topk), -1)
    for token, count in enumerate(visible_T.tolist()):
        chosen = torch.randperm(count, generator=gen)[: queries.topk]
        entries_TK[token, : len(chosen)] = chosen
    batch = plan.batch
    page_rows = queries.page_tokens // 4
    slots_TK = slots_of_positions(batch.token_pages_RP, batch.token_requests_T, entries_TK, page_rows)
    return RowSelection(slots_TK.int(), visible_T.clamp_max(queries.topk))


def _with_holes(queries: _Queries, rows: RowSelection, gen: torch.Generator) -> RowSelection:
    slots_TK = rows.slots_TK.clone()
    slots_TK[torch.rand(slots_TK.shape, generator=gen) < queries.holes] = -1
    if queries.blind >= 0:
        slots_TK[queries.blind] = -1
    return RowSelection(slots_TK, rows.lengths_T.clone())


def _selected(rows: RowSelection) -> Tensor:
    """Distinct slots that some token sees."""
    inside_TK = torch.arange(rows.slots_TK.shape[1]) < rows.lengths_T[:, None]
    distinct: Tensor = rows.slots_TK[inside_TK & (rows.slots_TK >= 0)].unique()
    return distinct


def _with_what_is_behind(
    queries: _Queries, rows: RowSelection, num_rows: int, gen: torch.Generator, device: str
) -> RowSelection:
    """The selection as a view of wider buffers; behind the lengths stand usable slots and impossible ones."""
    num_tokens, columns = rows.slots_TK.shape
    wide_TK = torch.randint(num_rows, (num_tokens, columns + 5), generator=gen, dtype=torch.int32)
    wide_TK[:, 1::3] = torch.iinfo(torch.int32).max
    wide_TK[:, 2::3] = -7
    if not queries.dirty:
        wide_TK.fill_(-1)
    inside_TK = torch.arange(columns) < rows.lengths_T[:, None]
    wide_TK[:, :columns] = torch.where(inside_TK, rows.slots_TK, wide_TK[:, :columns])
    return RowSelection(wide_TK.to(device)[:, :columns], rows.lengths_T.to(device))


def _layout(queries: _Queries, stored: str, dialect: Dialect, page_rows: int) -> CacheLayout:
    return cache_layout(
        "latent",
        RowFormat(stored),
        width=queries.width,
        rope_width=64,
        page_rows=page_rows,
        fp8_dialect=dialect,
    )


def _cache(
    ops: Ops,
    queries: _Queries,
    layout: CacheLayout,
    num_pages: int,
    rows: RowSelection,
    gen: torch.Generator,
    device: str,
) -> CacheHandle:
    cache = ops.kv_cache.allocate(layout, num_pages, device=device)
    rows_ND = normal(gen, num_pages * layout.page_rows, queries.width)
    if queries.dirty:
        unseen_N = torch.ones(rows_ND.shape[0], dtype=torch.bool)
        unseen_N[_selected(rows).long()] = False
        rows_ND[unseen_N] = torch.nan
    slots_N = torch.arange(rows_ND.shape[0], dtype=torch.int64)
    ops.kv_cache.write_rows(cache, slots_N.to(device), rows_ND.to(device))
    return cache
