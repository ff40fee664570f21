"""Sparse attention against a dense softmax over the same rows, written in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import RowFormat, cache_layout
from halocline.kernels_portable.row_reader import read_rows
from halocline.kernels_portable.row_writer import write_rows
from halocline.kernels_portable.sparse_attention import (
    AttentionTiles,
    SelectedRows,
    attention_tiles,
    num_attention_splits,
    sparse_attention,
)
from halocline.kernels_portable.target import Target

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # rows of NaN are written on purpose

SMALL = AttentionTiles(heads=16, rows=16, num_warps=4, num_stages=1)
MI300X = Target(shared_memory=65536, wave_size=64, num_processors=304)
MI355X = Target(shared_memory=163840, wave_size=64, num_processors=256)
H200 = Target(shared_memory=232448, wave_size=32, num_processors=132)


def _cache(row_format: RowFormat, page_rows: int, pages: int, width: int, seed: int, dialect: Any = "ocp") -> Any:
    layout = cache_layout(
        "latent", row_format, width=width, rope_width=64, page_rows=page_rows, fp8_dialect=dialect
    )  # fmt: skip
    memory = torch.zeros((pages, layout.page_stride), dtype=torch.uint8)
    rows = torch.randn(pages * page_rows, width, generator=torch.Generator().manual_seed(seed))
    rows[-1] = torch.nan
    write_rows(memory, layout, torch.arange(pages * page_rows), rows)
    return memory, layout


def _select(cache: Any, tokens: int, entries: int, lengths: list[int], seed: int, holes: float = 0.2) -> SelectedRows:
    """Random slots with holes; behind a length stand slots of the row of NaN, which must never be read."""
    memory, layout = cache
    gen = torch.Generator().manual_seed(seed)
    usable = memory.shape[0] * layout.page_rows - 1
    slots = torch.randint(0, usable, (tokens, entries), generator=gen, dtype=torch.int32)
    slots[torch.rand(tokens, entries, generator=gen) < holes] = -1
    slots[torch.arange(entries) >= torch.tensor(lengths)[:, None]] = usable
    return SelectedRows(memory, layout, slots, torch.tensor(lengths, dtype=torch.int32))


def _dense(q: Tensor, parts: list[SelectedRows], sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for t in range(q.shape[0]):
        rows = []
        for part in parts:
            slots = part.slots_TK[t, : int(part.lengths_T[t])]
            rows.append(read_rows(part.pages, part.layout, slots[slots >= 0]).double())
        kept = torch.cat(rows)
        scores = q[t].double() @ kept.T * scale
        with_sink = torch.cat([scores, sink.double()[:, None]], dim=1)
        outs.append(torch.softmax(with_sink, dim=1)[:, :-1] @ kept)
        lses.append(torch.logsumexp(scores, dim=1) if len(kept) else torch.full((q.shape[1],), torch.inf).double())
    return torch.stack(outs), torch.stack(lses)


def _check(q: Tensor, parts: list[SelectedRows], tiles: AttentionTiles, splits: int) -> None:
    sink = torch.linspace(-2, 3, q.shape[1])
    scale = q.shape[2] ** -0.5
    out, lse = sparse_attention(
        q, parts[0], parts[1] if len(parts) > 1 else None, sink, scale=scale, tiles=tiles, num_splits=splits
    )
    expected, expected_lse = _dense(q, parts, sink, scale)
    assert out.dtype == q.dtype
    exact = q.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-4 if exact else 2e-2, atol=1e-5 if exact else 2e-2)
    error = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < (1e-5 if exact else 6e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5 if exact else 1e-2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize(
    ("row_format", "dtype"),
    [
        (RowFormat.FP8_BLOCK64, torch.bfloat16),
        (RowFormat.BFLOAT16, torch.bfloat16),
        (RowFormat.FLOAT32, torch.float32),
    ],
)
def test_two_caches_with_holes_and_ragged_lengths(
    row_format: RowFormat, dtype: torch.dtype, dialect: str, splits: int
) -> None:
    if dialect == "fnuz" and row_format is not RowFormat.FP8_BLOCK64:
        dialect = "none"
    window = _select(_cache(row_format, 8, 5, 128, 0, dialect), 4, 24, [24, 1, 7, 24], 1)
    compressed = _select(_cache(row_format, 2, 30, 128, 2, dialect), 4, 64, [0, 40, 64, 13], 3)
    q = torch.randn(4, 5, 128, generator=torch.Generator().manual_seed(4)).to(dtype)
    _check(q, [window, compressed], SMALL, splits)


@pytest.mark.parametrize("target", [H200, MI300X, MI355X], ids=["large32", "small64", "large64"])
@pytest.mark.parametrize("heads", [2, 64])
def test_model_widths_with_the_tiles_of_each_target(target: Target, heads: int) -> None:
    tiles = attention_tiles(target, heads, torch.bfloat16)
    window = _select(_cache(RowFormat.FP8_BLOCK64, 64, 2, 512, 0), 1, 128, [128], 1, holes=0.0)
    compressed = _select(_cache(RowFormat.FP8_BLOCK64, 16, 3, 512, 2), 1, 64, [33], 3)
    q = torch.randn(1, heads, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
    _check(q, [window, compressed], tiles, 2)


def test_window_only_and_strided_queries() -> None:
    window = _select(_cache(RowFormat.FP8_BLOCK64, 8, 5, 128, 0), 3, 24, [3, 24, 17], 1)
    q = torch.randn(3, 9, 128, generator=torch.Generator().manual_seed(4)).bfloat16()[:, :4]
    _check(q, [window], SMALL, 1)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_token_that_sees_no_row_gives_zeros(splits: int) -> None:
    window = _select(_cache(RowFormat.FLOAT32, 8, 2, 128, 0), 3, 8, [0, 8, 8], 1)
    window.slots_TK[1] = -1
    q = torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(4))
    _check(q, [window], SMALL, splits)
    out, lse = sparse_attention(
        q, window, None, torch.full((4,), -torch.inf), scale=1.0, tiles=SMALL, num_splits=splits
    )
    assert torch.equal(out[:2], torch.zeros(2, 4, 128))
    assert torch.equal(lse[:2], torch.full((2, 4), torch.inf))
    assert out[2].isfinite().all()


def test_sink_enlarges_the_denominator_only() -> None:
    """Logits 1 and 2, sink 0.5, values 1 and 3 give 2.1168; without the sink it would be 2.4621."""
    layout = cache_layout("latent", RowFormat.FLOAT32, width=128, rope_width=64, page_rows=2)
    memory = torch.zeros((1, layout.page_stride), dtype=torch.uint8)
    rows = torch.zeros(2, 128)
    rows[0, :2], rows[1, :2] = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0])
    write_rows(memory, layout, torch.tensor([0, 1]), rows)
    q = torch.zeros(1, 1, 128)
    q[0, 0, 0] = 1.0
    window = SelectedRows(
        memory, layout, torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    )
    out, lse = sparse_attention(q, window, None, torch.tensor([0.5]), scale=1.0, tiles=SMALL, num_splits=1)
    assert float(out[0, 0, 1]) == pytest.approx(2.1168, abs=1e-4)
    assert float(lse[0, 0]) == pytest.approx(2.3133, abs=1e-4)


def test_a_token_has_the_same_bits_alone_and_in_a_batch() -> None:
    window = _select(_cache(RowFormat.FP8_BLOCK64, 8, 5, 128, 0), 4, 24, [24, 1, 7, 24], 1)
    q = torch.randn(4, 5, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    sink = torch.zeros(5)
    out, lse = sparse_attention(q, window, None, sink, scale=0.1, tiles=SMALL, num_splits=4)
    alone = window._replace(slots_TK=window.slots_TK[2:3], lengths_T=window.lengths_T[2:3])
    out_1, lse_1 = sparse_attention(q[2:3], alone, None, sink, scale=0.1, tiles=SMALL, num_splits=4)
    assert torch.equal(out[2:3], out_1)
    assert torch.equal(lse[2:3], lse_1)


def test_few_tokens_are_split_and_many_are_not() -> None:
    tiles = attention_tiles(H200, 64, torch.bfloat16)
    sizes = dict(num_heads=64, num_entries=640)
    assert num_attention_splits(H200, tiles, num_tokens=1, batch_invariant=False, **sizes) == 16
    assert num_attention_splits(H200, tiles, num_tokens=32, batch_invariant=False, **sizes) == 4
    assert num_attention_splits(H200, tiles, num_tokens=4096, batch_invariant=False, **sizes) == 1
    invariant = {num_attention_splits(H200, tiles, num_tokens=n, batch_invariant=True, **sizes) for n in (1, 7, 4096)}
    assert len(invariant) == 1
