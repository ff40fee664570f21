"""Index queries, logits and selection against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import RowFormat, cache_layout
from halocline.kernels_portable import index_select
from halocline.kernels_portable.index_logits import LogitTiles, index_logits, logit_tiles
from halocline.kernels_portable.index_query import prepare_index_query
from halocline.kernels_portable.index_select import select_entries
from halocline.kernels_portable.row_reader import read_rows
from halocline.kernels_portable.row_writer import write_rows
from halocline.kernels_portable.target import Target

H200 = Target(shared_memory=232448, wave_size=32, num_processors=132)


def _hadamard(width: int) -> Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / width**0.5


def _queries(tokens: int, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(tokens + heads)
    q = torch.randn(tokens, heads, width, generator=gen).to(dtype) * 2
    weights = torch.randn(tokens, heads, generator=gen).to(dtype)
    return q, weights, torch.randint(0, 90, (tokens,), generator=gen, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 64, 128), (3, 5, 64), (2, 33, 128)])
def test_queries_without_rounding(
    tokens: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    rotate: Callable[..., Tensor],
    rope_table: Callable[..., Tensor],
) -> None:
    q, weights, positions = _queries(tokens, heads, width, dtype)
    table = rope_table(100, 64)
    found, found_weights = prepare_index_query(q, weights, positions, table, rounding="none")
    expected = rotate(q.float(), table, positions.long()) @ _hadamard(width)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_weights, weights.float() * width**-0.5 * heads**-0.5)


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_queries_in_fp8(dialect: Any, rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]) -> None:
    q, weights, positions = _queries(3, 40, 128, torch.bfloat16)
    table = rope_table(100, 64)
    codes, found_weights = prepare_index_query(q, weights, positions, table, rounding="fp8_row", fp8_dialect=dialect)
    assert codes.dtype == {"ocp": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}[dialect]
    plain = (rotate(q.float(), table, positions.long()).bfloat16().float() @ _hadamard(128)).bfloat16().float()
    scale = plain.abs().amax(-1, keepdim=True) / 448
    expected = (plain / scale).to(torch.float8_e4m3fn).float() * scale
    unscaled = found_weights / (weights.float() * 128**-0.5 * 40**-0.5)
    found = codes.float() * unscaled[..., None]
    assert torch.isclose(found, expected, rtol=1e-3, atol=1e-6).float().mean() > 0.99
    assert (found - expected).norm() / expected.norm() < 2e-3


def test_queries_in_fp4(rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]) -> None:
    q, weights, positions = _queries(3, 40, 128, torch.bfloat16)
    table = rope_table(100, 64)
    found, _ = prepare_index_query(q, weights, positions, table, rounding="fp4_group32")
    plain = (rotate(q.float(), table, positions.long()).bfloat16().float() @ _hadamard(128)).bfloat16().float()
    groups = plain.unflatten(-1, (4, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).double() / 6))).float()
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = grid[((groups / scale).abs()[..., None] - grid).abs().argmin(-1)]
    expected = (torch.copysign(nearest, groups) * scale).flatten(-2)
    assert found.dtype == torch.bfloat16
    assert (found.float() == expected).float().mean() > 0.98  # exact ties and last bits aside


# ---- logits -------------------------------------------------------------------------------------------------------

FORMATS = [
    (RowFormat.FP8_ROW, torch.float8_e4m3fn, "ocp"),
    (RowFormat.FP8_ROW, torch.float8_e4m3fnuz, "fnuz"),
    (RowFormat.FP8_ROW, torch.bfloat16, "ocp"),
    (RowFormat.FP4_GROUP32, torch.bfloat16, "ocp"),
    (RowFormat.BFLOAT16, torch.bfloat16, "ocp"),
    (RowFormat.FLOAT32, torch.float32, "ocp"),
]


@pytest.mark.parametrize(("page_rows", "width", "heads"), [(64, 128, 64), (1, 64, 16), (16, 128, 5)])
@pytest.mark.parametrize(("row_format", "dtype", "dialect"), FORMATS)
def test_logits_of_paged_keys(
    row_format: RowFormat, dtype: torch.dtype, dialect: Any, page_rows: int, width: int, heads: int
) -> None:
    gen = torch.Generator().manual_seed(page_rows)
    layout = cache_layout("index_key", row_format, width=width, rope_width=0, page_rows=page_rows, fp8_dialect=dialect)
    entries = 37
    pages = -(-entries // page_rows)
    memory = torch.zeros((2 * pages, layout.page_stride), dtype=torch.uint8)
    write_rows(
        memory, layout, torch.arange(2 * pages * page_rows), torch.randn(2 * pages * page_rows, width, generator=gen)
    )
    table = torch.randperm(2 * pages, generator=gen, dtype=torch.int32).view(2, pages)
    requests = torch.tensor([0, 1, 1, -1, 0], dtype=torch.int32)
    visible = torch.tensor([entries, 20, 0, 0, 1], dtype=torch.int32)
    q = torch.randn(5, heads, width, generator=gen).to(dtype)
    weights = torch.randn(5, heads, generator=gen)
    tiles = LogitTiles(keys=16, steps=2, num_warps=4, num_stages=1)
    found = index_logits(q, weights, visible, requests, table, memory, layout, num_entries=entries + 3, tiles=tiles)
    assert found.shape == (5, entries + 3)
    for t in range(5):
        seen = int(visible[t])
        at = torch.arange(seen)
        slots = table[int(requests[t])][at // page_rows].long() * page_rows + at % page_rows
        keys = read_rows(memory, layout, slots).double()
        expected = (weights[t].double()[:, None] * (q[t].float().double() @ keys.T).relu()).sum(0)
        torch.testing.assert_close(found[t, :seen].double(), expected, rtol=1e-4, atol=2e-4)


def test_relu_is_taken_per_head_before_the_sum() -> None:
    """Head scores [2, -5, 1] and [-1, 4, 1]: key 1 wins."""
    layout = cache_layout("index_key", RowFormat.FLOAT32, width=64, rope_width=0, page_rows=4)
    memory = torch.zeros((1, layout.page_stride), dtype=torch.uint8)
    keys = torch.zeros(4, 64)
    keys[:3, :2] = torch.tensor([[2.0, -1.0], [-5.0, 4.0], [1.0, 1.0]])
    write_rows(memory, layout, torch.arange(4), keys)
    q = torch.eye(2, 64)[None]
    one = torch.ones(1, dtype=torch.int32)
    scores = index_logits(
        q, torch.ones(1, 2), 3 * one, 0 * one, torch.zeros((1, 1), dtype=torch.int32), memory, layout, num_entries=3,
        tiles=logit_tiles(H200, torch.float32),
    )  # fmt: skip
    assert torch.equal(scores[0], torch.tensor([2.0, 4.0, 2.0]))


def test_fp8_queries_refuse_other_keys() -> None:
    layout = cache_layout("index_key", RowFormat.FP4_GROUP32, width=128, rope_width=0, page_rows=4)
    empty = torch.empty(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="fp8_row keys are needed"):
        index_logits(
            torch.empty(0, 64, 128, dtype=torch.float8_e4m3fn), torch.empty(0, 64), empty, empty, empty[None],
            torch.empty(0, dtype=torch.uint8), layout, num_entries=8, tiles=logit_tiles(H200, torch.float8_e4m3fn),
        )  # fmt: skip


# ---- selection ----------------------------------------------------------------------------------------------------


def _select(scores: Tensor, visible: list[int], kept: int, page_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, entries = scores.shape
    table = torch.randperm(2 * entries, generator=torch.Generator().manual_seed(1), dtype=torch.int32)[
        : -(-entries // page_rows)
    ]
    slots, lengths = select_entries(
        scores, torch.tensor(visible, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32), table[None],
        num_kept=kept, page_rows=page_rows,
    )  # fmt: skip
    return slots, lengths, table


@pytest.mark.parametrize("page_rows", [1, 16, 64])
@pytest.mark.parametrize(("entries", "kept"), [(40, 8), (700, 64), (3000, 512), (2100, 1024)])
def test_selection_is_the_exact_set(entries: int, kept: int, page_rows: int) -> None:
    gen = torch.Generator().manual_seed(entries)
    scores = torch.randn(4, entries, generator=gen) * torch.tensor([[1.0], [1e-30], [1e30], [1.0]])
    visible = [entries, entries - 1, entries, kept]
    for t, seen in enumerate(visible):
        scores[t, seen:] = torch.nan
    slots, lengths, table = _select(scores, visible, kept, page_rows)
    assert lengths.tolist() == [min(kept, seen) for seen in visible]
    for t, seen in enumerate(visible):
        best = scores[t, :seen].topk(min(kept, seen)).indices
        expected = table[best // page_rows].long() * page_rows + best % page_rows
        assert slots[t].sort().values.tolist() == expected.sort().values.tolist()


def test_ties_infinities_and_short_rows() -> None:
    scores = torch.tensor(
        [
            [-torch.inf, 0.5, -torch.inf, 9.0, 9.0, 9.0, 9.0, 9.0],
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            [0.0, -0.0, 3.0, -3.0, torch.inf, -1.0, 2.0, 2.0],
            [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0],
        ]
    )
    slots, lengths, table = _select(scores, [3, 8, 8, 0], 3, 1)
    assert lengths.tolist() == [3, 3, 3, 0]
    assert set(slots[0].tolist()) == set(table[:3].tolist()), "a real -inf beats every filler"
    assert slots[1].tolist() == table[:3].tolist(), "ties keep the lowest entries"
    assert set(slots[2].tolist()) == set(table[[4, 2, 6]].tolist())
    assert slots[3].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("entries", [65, 70, 96, 300, 2100])
@pytest.mark.parametrize("distinct", [3, 40, 1000000])
def test_shortlists_of_long_rows_change_nothing(entries: int, distinct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to three shortlists of small chunks; few distinct scores make ties within and across chunks."""
    monkeypatch.setattr(index_select, "_MOST_ENTRIES", 64)
    monkeypatch.setattr(index_select, "_CHUNK", 32)
    kept, gen = 8, torch.Generator().manual_seed(entries)
    scores = torch.randint(distinct, (6, entries), generator=gen).float() - distinct // 2
    visible = [entries, entries - 1, 33, 32, 5, 0]
    for t, seen in enumerate(visible):
        scores[t, seen:] = torch.nan
    slots, lengths, table = _select(scores, visible, kept, 1)
    assert lengths.tolist() == [min(kept, seen) for seen in visible]
    for t, seen in enumerate(visible):
        best = scores[t, :seen].sort(descending=True, stable=True).indices[:kept]  # ties keep the lowest entries
        assert sorted(slots[t, : len(best)].tolist()) == sorted(table[best].tolist())
        assert bool((slots[t, len(best) :] == -1).all())


@pytest.mark.parametrize(("entries", "kept"), [(9000, 512), (40000, 1024)])
def test_long_rows_at_model_size(entries: int, kept: int) -> None:
    scores = torch.randn(1, entries, generator=torch.Generator().manual_seed(kept))
    slots, lengths, table = _select(scores, [entries - 3], kept, 64)
    best = scores[0, : entries - 3].topk(kept).indices
    expected = table[best // 64].long() * 64 + best % 64
    assert lengths.tolist() == [kept]
    assert slots[0].sort().values.tolist() == expected.sort().values.tolist()


@pytest.mark.parametrize("entries", [513, 2048, 2049, 8192])
@pytest.mark.parametrize("distinct", [1, 5, 3000, 1 << 23])
def test_selection_is_in_order_of_entries(entries: int, distinct: int) -> None:
    """In either tile, with ties among the best that end the search early, late or never."""
    scores = torch.randint(distinct, (2, entries), generator=torch.Generator().manual_seed(distinct)).float()
    scores[1] = 1 - scores[1]  # that few bits tell apart, around the change of sign
    slots, lengths, table = _select(scores, [entries, entries], 512, 16)
    assert lengths.tolist() == [512, 512]
    for t in range(2):
        best = scores[t].sort(descending=True, stable=True).indices[:512].sort().values
        assert slots[t].tolist() == (table[best // 16].long() * 16 + best % 16).tolist()


def test_more_than_a_tile_can_count_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 8192"):
        _select(torch.zeros(1, 9000), [9000], 8193, 1)


def test_no_cliff_where_selection_starts() -> None:
    """As many candidates as are kept, then one more with a hopeless score: the same set."""
    scores = torch.randn(1, 65, generator=torch.Generator().manual_seed(3))
    scores[0, 64] = -1e30
    all_of_them, _, _ = _select(scores, [64], 64, 4)
    chosen, _, _ = _select(scores, [65], 64, 4)
    assert set(all_of_them[0].tolist()) == set(chosen[0].tolist())


def test_pages_that_are_missing_give_holes_and_padding_keeps_nothing() -> None:
    table = torch.tensor([[5, -1, 2]], dtype=torch.int32)
    slots, lengths = select_entries(
        torch.arange(12.0).repeat(2, 1), torch.tensor([10, 10], dtype=torch.int32),
        torch.tensor([0, -1], dtype=torch.int32), table, num_kept=6, page_rows=4,
    )  # fmt: skip
    assert lengths.tolist() == [6, 0]
    assert sorted(slots[0].tolist()) == [-1, -1, -1, -1, 8, 9]
    assert slots[1].tolist() == [-1] * 6
