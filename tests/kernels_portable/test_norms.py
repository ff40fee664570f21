"""Norms of rows and of query heads against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halocline.kernels_portable.query_norm_rope import query_norm_rope
from halocline.kernels_portable.rms_norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # one rounding of the result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 512), (3, 7168), (2, 3, 48), (0, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=gen) * 5).to(dtype)
    gain = torch.randn(shape[-1], generator=gen).to(dtype)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    found = rms_norm(x, gain, eps=1e-6)
    assert found.shape == x.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_rms_norm_of_strided_rows_reads_only_its_lanes() -> None:
    wide = torch.full((3, 100), torch.nan)
    wide[:, :64] = torch.arange(192).view(3, 64).float()
    found = rms_norm(wide[:, :64], torch.ones(64), eps=0.0)
    torch.testing.assert_close(found.square().mean(-1), torch.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 64, 512), (5, 3, 128), (2, 8, 192), (0, 2, 128)])
def test_query_norm_rope(
    tokens: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    rotate: Callable[..., Tensor],
    rope_table: Callable[..., Tensor],
) -> None:
    gen = torch.Generator().manual_seed(2)
    q = (torch.randn(tokens, heads, width, generator=gen) * 7).to(dtype)
    positions = torch.randint(0, 300, (tokens,), generator=gen, dtype=torch.int32)
    table = rope_table(300, 64)
    normed = q.double() / (q.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = rotate(normed.float(), table, positions.long())
    found = query_norm_rope(q, positions, table, eps=1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.float(), expected, rtol=TOLERANCE[dtype], atol=3e-6 if dtype is torch.float32 else 4e-3
    )


def test_query_padding_disturbs_nothing(rope_table: Callable[..., Tensor]) -> None:
    q = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(4))
    table = rope_table(8, 64)
    alone = query_norm_rope(q[:1], torch.tensor([5], dtype=torch.int32), table, eps=1e-6)
    padded = query_norm_rope(q, torch.tensor([5, -1, -1], dtype=torch.int32), table, eps=1e-6)
    assert torch.equal(padded[:1], alone)
