"""Hyper-connections against their formula, written with loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.kernels_portable.stream_head import collapse_streams
from halocline.kernels_portable.stream_mix import MANY_SPLITS, num_mix_splits
from halocline.kernels_portable.stream_read import read_streams
from halocline.kernels_portable.stream_write import write_streams
from halocline.kernels_portable.target import Target

EPS = 1e-6
H200 = Target(shared_memory=232448, wave_size=32, num_processors=132)
CASES = [(1, 4, 64, 1), (17, 4, 320, 4), (3, 2, 48, 2), (2, 4, 4096, 32), (1, 4, 4096, 128)]
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.bfloat16: (1e-2, 2e-2)}


def _inputs(tokens: int, n: int, hidden: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(tokens + hidden)
    streams = torch.randn(tokens, n, hidden, generator=gen).to(dtype)
    fn = torch.randn(rows, n * hidden, generator=gen) / hidden**0.5
    return streams, fn, torch.randn(rows, generator=gen)


def _logits(streams: Tensor, fn: Tensor) -> Tensor:
    u = streams.double().flatten(1)
    return (u @ fn.double().T) / (u.square().mean(-1, keepdim=True) + EPS).sqrt()


def _comb(logits: Tensor, rounds: int) -> Tensor:
    """One token's matrix: softmax over k, then columns, then (rows, columns) for the other rounds."""
    comb = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True) + EPS
    for r in range(rounds):
        if r:
            comb = comb / (comb.sum(1, keepdim=True) + EPS)
        comb = comb / (comb.sum(0, keepdim=True) + EPS)
    return comb


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "n", "hidden", "splits"), CASES)
def test_read(tokens: int, n: int, hidden: int, splits: int, dtype: torch.dtype) -> None:
    streams, fn, base = _inputs(tokens, n, hidden, dtype, (2 + n) * n)
    scale = torch.tensor([0.7, 1.3, 0.9])
    x, post, comb = read_streams(
        streams, fn, base, scale, norm_eps=EPS, hc_eps=EPS, sinkhorn_iterations=20, num_splits=splits
    )
    m = _logits(streams, fn)
    pre = torch.sigmoid(m[:, :n] * 0.7 + base[:n]) + EPS
    expected = sum(pre[:, j, None] * streams[:, j].double() for j in range(n))
    rtol, atol = TOLERANCE[dtype]
    assert x.dtype == dtype
    torch.testing.assert_close(x.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        post.double(), 2 * torch.sigmoid(m[:, n : 2 * n] * 1.3 + base[n : 2 * n]), rtol=1e-5, atol=1e-5
    )
    for t in range(tokens):
        logits = (m[t, 2 * n :] * float(scale[2]) + base[2 * n :]).view(n, n)
        torch.testing.assert_close(comb[t].double(), _comb(logits, 20), rtol=1e-4, atol=1e-5)


def test_the_last_normalisation_is_over_columns() -> None:
    streams, fn, base = _inputs(2, 4, 64, torch.float32, 24)
    _, _, comb = read_streams(
        streams, 5 * fn, base, torch.ones(3), norm_eps=EPS, hc_eps=EPS, sinkhorn_iterations=2, num_splits=1
    )
    torch.testing.assert_close(comb.sum(1), torch.ones(2, 4), rtol=0, atol=3e-6)
    assert ((comb.sum(2) - 1).abs() > 1e-3).any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "n", "hidden"), [(1, 4, 64), (5, 4, 700), (3, 2, 48), (0, 4, 64)])
def test_write_mixes_old_streams_by_their_first_index(tokens: int, n: int, hidden: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(hidden)
    y, streams = (
        torch.randn(tokens, hidden, generator=gen).to(dtype),
        torch.randn(tokens, n, hidden, generator=gen).to(dtype),
    )
    post, comb = torch.rand(tokens, n, generator=gen), torch.rand(tokens, n, n, generator=gen)
    found = write_streams(y, streams, post, comb)
    assert found.shape == streams.shape
    for k in range(n):
        mixed = sum(comb[:, j, k, None].double() * streams[:, j].double() for j in range(n))
        expected = post[:, k, None].double() * y.double() + mixed
        torch.testing.assert_close(found[:, k].double(), expected, rtol=TOLERANCE[dtype][0], atol=1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "n", "hidden", "splits"), CASES)
def test_head(tokens: int, n: int, hidden: int, splits: int, dtype: torch.dtype) -> None:
    streams, fn, base = _inputs(tokens, n, hidden, dtype, n)
    found = collapse_streams(streams, fn, base, torch.tensor([0.8]), norm_eps=EPS, hc_eps=EPS, num_splits=splits)
    pre = torch.sigmoid(_logits(streams, fn) * 0.8 + base) + EPS
    expected = sum(pre[:, j, None] * streams[:, j].double() for j in range(n))
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype][0], atol=TOLERANCE[dtype][1])


def test_mixing_logits_have_float32_quality_on_bfloat16_streams() -> None:
    """A matrix whose bfloat16 rounding would cancel everything that counts."""
    streams = torch.ones(1, 4, 64).bfloat16()
    fn = torch.zeros(24, 256)
    fn[4:8, ::2], fn[4:8, 1::2] = 1.0 + 2.0**-16, -1.0
    _, post, _ = read_streams(
        streams, fn, torch.zeros(24), torch.tensor([1.0, 512.0, 1.0]), norm_eps=0.0, hc_eps=EPS,
        sinkhorn_iterations=1, num_splits=1,
    )  # fmt: skip
    expected = 2 * torch.sigmoid(torch.tensor(128 * 2.0**-16 * 512))
    torch.testing.assert_close(post, expected.expand(1, 4), rtol=1e-5, atol=0)


def test_three_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="a power of two"):
        read_streams(
            torch.ones(1, 3, 8), torch.ones(15, 24), torch.ones(15), torch.ones(3), norm_eps=EPS, hc_eps=EPS,
            sinkhorn_iterations=2, num_splits=1,
        )  # fmt: skip


def test_splits_fill_the_device_and_may_be_fixed() -> None:
    def splits(tokens: int, **options: Any) -> int:
        return num_mix_splits(H200, num_tokens=tokens, lanes=16384, **options)

    many = [splits(n, batch_invariant=False, most=MANY_SPLITS) for n in (1, 32, 33, 128, 129, 8192)]
    assert many == [128, 128, 32, 32, 8, 1]
    assert [splits(n, batch_invariant=False) for n in (1, 128, 8192)] == [32, 32, 1]
    assert len({splits(n, batch_invariant=True) for n in (1, 100, 8192)}) == 1
