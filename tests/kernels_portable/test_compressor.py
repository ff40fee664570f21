"""The compressor against the pooling formula on whole sequences, however the tokens are fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import CacheLayout, RowFormat, cache_layout
from halocline.kernels_portable.compressor_insert import (
    MOST_ARRIVALS,
    StepRequests,
    insert_entries,
    most_tokens_of_a_request,
)
from halocline.kernels_portable.row_reader import read_rows
from halocline.kernels_portable.row_writer import write_rows

EPS = 1e-6


def _entries(  # one request's whole sequence, in float64
    values: Tensor, scores: Tensor, bias: Tensor, gain: Tensor, table: Tensor, ratio: int, rotate: Any, transform: bool
) -> Tensor:
    width, entries = gain.numel(), []
    scores = scores + bias[torch.arange(len(scores)) % ratio]
    for j in range(len(values) // ratio):
        block = slice(j * ratio, (j + 1) * ratio)
        pool_v, pool_s = [values[block, -width:]], [scores[block, -width:]]
        if ratio == 4 and j:
            before = slice((j - 1) * ratio, j * ratio)
            pool_v.append(values[before, :width])
            pool_s.append(scores[before, :width])
        share = torch.softmax(torch.cat(pool_s).double(), dim=0)
        entries.append((share * torch.cat(pool_v).double()).sum(0))
    pooled = torch.stack(entries) if entries else torch.empty(0, width)
    normed = pooled / (pooled.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()
    rotated = rotate(normed.float(), table, torch.arange(len(entries)) * ratio)
    if not transform:
        return rotated
    lanes = torch.arange(width)
    parity = torch.tensor([bin(int(i)).count("1") % 2 for i in (lanes[:, None] & lanes[None, :]).flatten()])
    return rotated @ (1.0 - 2.0 * parity.view(width, width)).T / width**0.5


class _Feeder:
    """Requests with pages and state of their own, fed piece by piece."""

    def __init__(
        self, layout: CacheLayout, ratio: int, lengths: list[int], extra: int, seed: int, *, first_lane: int = 32
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        lanes = layout.width * (2 if ratio == 4 else 1)
        self.layout, self.ratio, self.fed = layout, ratio, [0] * len(lengths)
        self.values = [torch.randn(n, lanes, generator=gen) for n in lengths]
        self.scores = [torch.randn(n, lanes, generator=gen) * 2 for n in lengths]
        self.bias = torch.randn(ratio, lanes, generator=gen)
        self.gain = 1 + 0.2 * torch.randn(layout.width, generator=gen)
        ring = (8 if ratio == 4 else ratio) + extra
        wide = torch.full((len(lengths) + 2, ring, 2, lanes + 48), torch.nan)  # a slot is never cleared
        self.state = wide[..., first_lane : lanes + first_lane]  # others have their lanes in it, too
        self.others = wide[..., :first_lane], wide[..., lanes + first_lane :]
        self.arrivals: Tensor | None = torch.zeros(MOST_ARRIVALS, dtype=torch.int32)
        pages = max(-(-n // (layout.page_rows * ratio)) for n in lengths)
        order = torch.randperm(pages * len(lengths), generator=gen, dtype=torch.int32)
        self.table_RP = order.view(len(lengths), pages)
        self.pages = torch.zeros((pages * len(lengths), layout.page_stride), dtype=torch.uint8)

    def step(self, counts: list[int], table: Tensor, *, padding: int = 0, decode: bool = False) -> None:
        positions, requests, starts, values, scores = [], [], [0], [], []
        for r, count in enumerate(counts):
            span = range(self.fed[r], self.fed[r] + count)
            positions += span
            requests += [r] * count
            starts.append(len(positions))
            values.append(self.values[r][span.start : span.stop])
            scores.append(self.scores[r][span.start : span.stop])
            self.fed[r] += count
        fill = torch.full((padding, self.bias.shape[1]), torch.nan)
        tokens = len(positions)
        decoded = (tokens, sum(c > 0 for c in counts)) if decode else (0, 0)
        step = StepRequests(
            positions_T=torch.tensor(positions + [-1] * padding, dtype=torch.int32),
            requests_T=torch.tensor(requests + [-1] * padding, dtype=torch.int32),
            query_starts_R1=torch.tensor(starts, dtype=torch.int32),
            seqlens_R=torch.tensor(self.fed, dtype=torch.int32),
            state_slots_R=torch.arange(1, len(counts) + 1, dtype=torch.int32).flip(0),
            token_pages_RP=self.table_RP,
            most_tokens=most_tokens_of_a_request(tokens, *decoded),
            arrivals_T=self.arrivals,
        )
        insert_entries(
            step, torch.cat([*values, fill]), torch.cat([*scores, fill]), self.bias, self.gain, table, self.state,
            self.pages, self.layout, ratio=self.ratio, transform=self.layout.kind == "index_key", eps=EPS,
        )  # fmt: skip

    def found(self, r: int) -> Tensor:
        entries = torch.arange(self.fed[r] // self.ratio)
        rows = self.layout.page_rows
        return read_rows(self.pages, self.layout, self.table_RP[r][entries // rows].long() * rows + entries % rows)


def _layout(kind: Any, row_format: RowFormat, width: int, page_rows: int, dialect: Any = "ocp") -> CacheLayout:
    rope = 64 if kind == "latent" else 0
    return cache_layout(kind, row_format, width=width, rope_width=rope, page_rows=page_rows, fp8_dialect=dialect)


def _check(feeder: _Feeder, table: Tensor, rotate: Any) -> None:
    assert all(bool(lanes.isnan().all()) for lanes in feeder.others)
    assert feeder.arrivals is None or not feeder.arrivals.any()
    for r in range(len(feeder.fed)):
        n = feeder.fed[r]
        expected = _entries(
            feeder.values[r][:n], feeder.scores[r][:n], feeder.bias, feeder.gain, table, feeder.ratio, rotate,
            feeder.layout.kind == "index_key",
        )  # fmt: skip
        found = feeder.found(r)
        assert found.shape == expected.shape
        if feeder.layout.format is RowFormat.FLOAT32:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        elif len(expected):
            _check_rounded(feeder.layout, found, expected)


def _check_rounded(layout: CacheLayout, found: Tensor, expected: Tensor) -> None:
    """Nearly all lanes are the expected value in the row format; bfloat16 in between moves a few to a neighbour."""
    pages = torch.zeros((1, layout.page_stride), dtype=torch.uint8)
    assert len(expected) <= layout.page_rows
    write_rows(pages, layout, torch.arange(len(expected)), expected)
    rounded = read_rows(pages, layout, torch.arange(len(expected)))
    assert torch.isclose(found, rounded, rtol=1e-2, atol=1e-2).float().mean() > 0.93
    assert (found - rounded).norm() / rounded.norm() < (6e-3 if layout.format is RowFormat.BFLOAT16 else 3e-2)


CHUNKS = [
    [[9, 1, 16]],
    [[1, 0, 3], [1, 1, 1], [1, 1, 4], [6, 2, 8], [1, 1, 1]],
    [[7, 3, 5], [0, 9, 1], [5, 1, 20]],
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=["once", "pieces", "ragged"])
@pytest.mark.parametrize("kind", ["latent", "index_key"])
def test_ratio_4_in_float32(
    kind: str, chunks: list[list[int]], rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]
) -> None:
    feeder = _Feeder(_layout(kind, RowFormat.FLOAT32, 128, 2), 4, [40, 40, 40], 0, 5)
    table = rope_table(64, 64)
    for counts in chunks:
        feeder.step(counts, table, padding=2)
    _check(feeder, table, rotate)


@pytest.mark.parametrize(
    "chunks", [[[130, 255]], [[100, 127], [28, 1], [1, 1], [127, 130]], [[1, 256], [127, 0], [130, 1]]]
)
def test_ratio_128_in_float32(
    chunks: list[list[int]], rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]
) -> None:
    feeder = _Feeder(_layout("latent", RowFormat.FLOAT32, 128, 2), 128, [259, 259], 0, 6)
    table = rope_table(300, 64)
    for counts in chunks:
        feeder.step(counts, table)
    _check(feeder, table, rotate)


@dataclass(frozen=True, kw_only=True)
class _Sharing:
    """Steps of two requests; few tokens share a block among many programs, more tokens among few."""

    chunks: list[list[int]]
    width: int
    extra: int = 0
    decode: bool = False
    is_allowed: bool = True


SHARING = {
    "several_closings": _Sharing(chunks=[[127, 127], [1, 1]], width=96, decode=True),
    "one_launch": _Sharing(chunks=[[124, 125], [2, 2], [2, 2]], width=160, extra=3, decode=True),
    "two_launches": _Sharing(chunks=[[100, 126], [28, 12]], width=512),
    "one_closing": _Sharing(chunks=[[127, 60], [1, 0], [3, 9]], width=64),
    "not_allowed": _Sharing(chunks=[[127, 60], [1, 1]], width=128, decode=True, is_allowed=False),
}


@pytest.mark.parametrize("sharing", SHARING.values(), ids=SHARING)
def test_programs_share_a_block(
    sharing: _Sharing, rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]
) -> None:
    """The last program may have lanes that are no lanes of the row; a block's rows come from both places."""
    layout = _layout("latent", RowFormat.FLOAT32, sharing.width, 2)
    feeder = _Feeder(layout, 128, [140, 140], sharing.extra, 11)
    feeder.arrivals = feeder.arrivals if sharing.is_allowed else None
    table = rope_table(140, 64)
    for place, counts in enumerate(sharing.chunks):
        feeder.step(counts, table, padding=2, decode=sharing.decode and place > 0)
    _check(feeder, table, rotate)


def test_closings_of_one_request_in_one_step(rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]) -> None:
    """The second block pools the first one's rows of the same step, after rows of the state."""
    for extra in (0, 5):
        feeder = _Feeder(_layout("index_key", RowFormat.FLOAT32, 64, 2), 4, [26, 26], extra, 14)
        table = rope_table(64, 64)
        for counts in ([3, 6], [9, 6], [5, 5], [9, 9]):
            feeder.step(counts, table, decode=True)
        _check(feeder, table, rotate)


@pytest.mark.parametrize("ratio", [4, 128])
def test_rows_that_are_not_aligned(
    ratio: int, rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]
) -> None:
    feeder = _Feeder(_layout("latent", RowFormat.FLOAT32, 128, 2), ratio, [131], 2, 13, first_lane=33)
    table = rope_table(140, 64)
    for count in (126, 1, 4):
        feeder.step([count], table)
    _check(feeder, table, rotate)


@pytest.mark.parametrize("extra", [0, 5])
def test_decoding_several_tokens_at_a_time(
    extra: int, rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]
) -> None:
    """A ring with spare rows lets one launch do all; without them two launches must, and the answer is the same."""
    feeder = _Feeder(_layout("latent", RowFormat.FLOAT32, 128, 2), 4, [30, 30], extra, 7)
    table = rope_table(64, 64)
    for _ in range(5):
        feeder.step([6, 6], table, decode=True)
    _check(feeder, table, rotate)


@pytest.mark.parametrize(
    ("kind", "row_format", "width"),
    [
        ("latent", RowFormat.FP8_BLOCK64, 512),
        ("latent", RowFormat.BFLOAT16, 128),
        ("index_key", RowFormat.FP8_ROW, 128),
        ("index_key", RowFormat.FP4_GROUP32, 128),
        ("index_key", RowFormat.BFLOAT16, 64),
    ],
)
@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_every_row_format(
    kind: str,
    row_format: RowFormat,
    width: int,
    dialect: str,
    rotate: Callable[..., Tensor],
    rope_table: Callable[..., Tensor],
) -> None:
    feeder = _Feeder(_layout(kind, row_format, width, 4, dialect), 4, [14, 5], 0, 8)
    table = rope_table(64, 64)
    feeder.step([9, 2], table)
    feeder.step([1, 1], table, decode=True)
    feeder.step([4, 2], table)
    _check(feeder, table, rotate)


def test_lanes_that_are_not_contiguous_are_refused(rope_table: Callable[..., Tensor]) -> None:
    feeder = _Feeder(_layout("latent", RowFormat.FLOAT32, 128, 2), 4, [4], 0, 5)
    feeder.state = feeder.state.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="lanes must be contiguous"):
        feeder.step([4], rope_table(64, 64))


def test_rolled_back_drafts_leave_no_trace(rope_table: Callable[..., Tensor]) -> None:
    """Rows of rejected drafts are fed again with other values; entries are those of the accepted tokens alone."""
    layout = _layout("latent", RowFormat.FLOAT32, 128, 2)
    table = rope_table(64, 64)
    straight, drafted = (_Feeder(layout, 4, [24], 5, 9) for _ in range(2))
    straight.step([24], table)
    truth_v, truth_s = drafted.values[0].clone(), drafted.scores[0].clone()
    for start in range(0, 24, 2):
        drafts = min(6, 24 - start)
        drafted.fed[0] = start
        drafted.values[0] = torch.cat([truth_v[: start + 2], torch.full_like(truth_v[start + 2 :], 9.0)])
        drafted.scores[0] = torch.cat([truth_s[: start + 2], torch.full_like(truth_s[start + 2 :], 9.0)])
        drafted.step([drafts], table, decode=True)
    drafted.fed[0] = 24
    torch.testing.assert_close(drafted.found(0), straight.found(0), rtol=0, atol=0)
