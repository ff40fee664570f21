"""Writing, reading and inserting cached rows: bytes against torch's own FP8 types and plain index arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import CacheLayout, RowFormat, cache_layout
from halocline.kernels_portable.row_reader import read_rows
from halocline.kernels_portable.row_writer import write_rows
from halocline.kernels_portable.window_insert import insert_window

LATENTS = [RowFormat.FLOAT32, RowFormat.BFLOAT16, RowFormat.FP8_BLOCK64]
KEYS = [RowFormat.FLOAT32, RowFormat.BFLOAT16, RowFormat.FP8_ROW, RowFormat.FP4_GROUP32]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _layout(row_format: RowFormat, kind: Any, width: int, page_rows: int, dialect: Any = "ocp") -> CacheLayout:
    rope = 64 if kind == "latent" else 0
    return cache_layout(kind, row_format, width=width, rope_width=rope, page_rows=page_rows, fp8_dialect=dialect)


def _values(rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, exact powers of two, zeros and a signed zero among them."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=gen) * torch.logspace(-7, 3, rows)[:, None]
    x[0] = 0.0
    x[1, :64] = torch.cat([torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-10), 8192.0]), torch.zeros(59)])
    x[2, 3] = -0.0
    return x


def _power_of_two_above(ratio: Tensor) -> Tensor:
    """Smallest power of two that is not below; frexp gives fraction 0.5 for exact powers."""
    fraction, exponent = torch.frexp(ratio.double())
    return torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())


def _fp8_groups(x: Tensor, group: int) -> Tensor:
    blocks = x.double().unflatten(-1, (-1, group))
    scale = _power_of_two_above(blocks.abs().amax(-1, keepdim=True).clamp(min=float(torch.tensor(1e-4))) / 448)
    return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2).float()


def _fp4_groups(x: Tensor) -> Tensor:
    blocks = x.double().unflatten(-1, (-1, 32))
    scale = _power_of_two_above(blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    grid = torch.tensor(FP4, dtype=torch.float64)
    distance = ((blocks / scale).abs()[..., None] - grid).abs()
    # Ties go to the even code; the grid is scanned from even codes first.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    nearest = grid[order[distance[..., order].argmin(-1)]]
    return (torch.copysign(nearest, blocks) * scale).flatten(-2).float()


def _round(layout: CacheLayout, x: Tensor) -> Tensor:
    if layout.format is RowFormat.FLOAT32:
        return x
    if layout.format is RowFormat.BFLOAT16:
        return x.bfloat16().float()
    if layout.format is RowFormat.FP8_BLOCK64:
        return torch.cat([_fp8_groups(x[:, :-64], 64), x[:, -64:].bfloat16().float()], dim=1)
    if layout.format is RowFormat.FP8_ROW:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale
    return _fp4_groups(x)


CASES = [(f, "latent", w) for f in LATENTS for w in (128, 512)] + [(f, "index_key", w) for f in KEYS for w in (64, 128)]


@pytest.mark.parametrize("page_rows", [2, 64])
@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize(("row_format", "kind", "width"), CASES)
def test_rows_come_back_rounded_as_the_format_says(
    row_format: RowFormat, kind: str, width: int, dialect: str, page_rows: int
) -> None:
    layout = _layout(row_format, kind, width, page_rows, dialect)
    x = _values(9, width)
    pages = torch.full((20, layout.page_stride), 0xAB, dtype=torch.uint8)
    slots = torch.tensor([5, -1, 0, 20 * page_rows - 1, 7, -1, 2, 9, 3])
    write_rows(pages, layout, slots, x)
    kept = slots >= 0
    expected = torch.where(kept[:, None], _round(layout, x), 0.0)
    torch.testing.assert_close(read_rows(pages, layout, slots), expected, rtol=0, atol=0)
    torch.testing.assert_close(
        read_rows(pages, layout, slots, dtype=torch.bfloat16), expected.bfloat16(), rtol=0, atol=0
    )


@pytest.mark.parametrize(("row_format", "kind", "width"), CASES)
def test_holes_leave_every_other_byte_alone(row_format: RowFormat, kind: str, width: int) -> None:
    layout = _layout(row_format, kind, width, 4)
    pages = torch.full((3, layout.page_stride), 0xAB, dtype=torch.uint8)
    write_rows(pages, layout, torch.tensor([2, -1, 5], dtype=torch.int32), _values(3, width))
    touched = int((pages != 0xAB).sum())
    assert 0 < touched <= 2 * layout.row_bytes
    before = pages.clone()
    write_rows(pages, layout, torch.tensor([-1, -1, -1]), _values(3, width))
    assert torch.equal(pages, before)


def test_latent_bytes_lie_where_the_layout_says() -> None:
    layout = _layout(RowFormat.FP8_BLOCK64, "latent", 512, 64)
    x = _values(3, 512)
    pages = torch.zeros((2, layout.page_stride), dtype=torch.uint8)
    write_rows(pages, layout, torch.tensor([64 + 5, 0, 9]), x)
    codes = pages[1, 5 * 576 : 5 * 576 + 448].view(torch.float8_e4m3fn).float()
    scales = pages[1, 64 * 576 + 5 * 8 : 64 * 576 + 5 * 8 + 8]
    assert scales[7] == 0
    assert torch.equal(
        codes * torch.exp2(scales[:7].float() - 127).repeat_interleave(64), _fp8_groups(x[:1, :448], 64)[0]
    )
    tail = pages[1, 5 * 576 + 448 : 6 * 576].view(torch.bfloat16)
    assert torch.equal(tail, x[0, 448:].bfloat16())
    assert layout.page_stride == 37440


def test_fnuz_bytes_read_by_torch_are_the_same_numbers() -> None:
    layout = _layout(RowFormat.FP8_BLOCK64, "latent", 128, 2, "fnuz")
    x = _values(3, 128)[1:]
    x[1, 0] = -1e-12
    pages = torch.zeros((1, layout.page_stride), dtype=torch.uint8)
    write_rows(pages, layout, torch.tensor([0, 1]), x)
    codes = pages[0, 192:256]
    assert not (codes == 0x80).any(), "0x80 is NaN in FNUZ"
    scale = torch.exp2(pages[0, 2 * 192 + 8].float() - 127)
    assert torch.equal(codes.view(torch.float8_e4m3fnuz).float() * scale, _fp8_groups(x[1:, :64], 64)[0])


@pytest.mark.parametrize("page", [15_000])
def test_offsets_are_64_bit(page: int) -> None:
    """The last slot of a pool of 2.25e9 bytes; the pool is mapped, never touched as a whole."""
    layout = _layout(RowFormat.FP8_BLOCK64, "latent", 512, 256)
    assert page * layout.page_stride > 2**31
    pages = torch.empty((page + 1, layout.page_stride), dtype=torch.uint8)
    x = _values(3, 512)[2:]
    slots = torch.tensor([page * 256 + 255], dtype=torch.int32)
    write_rows(pages, layout, slots, x)
    assert torch.equal(read_rows(pages, layout, slots), _round(layout, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("row_format", "width"), [(f, w) for f in LATENTS for w in (128, 512)])
def test_window_insert(
    row_format: RowFormat,
    width: int,
    dtype: torch.dtype,
    rotate: Callable[..., Tensor],
    rope_table: Callable[..., Tensor],
) -> None:
    layout = _layout(row_format, "latent", width, 8)
    gen = torch.Generator().manual_seed(3)
    wide = (torch.randn(7, width + 32, generator=gen) * 3).to(dtype)
    kv, gain = wide[:, :width], 1 + 0.3 * torch.randn(width, generator=gen)
    positions = torch.tensor([0, 1, 40, 199, 17, -1, 5], dtype=torch.int32)
    slots = torch.tensor([0, 23, 9, 8, -1, -1, 15])
    table = rope_table(200, 64)
    pages = torch.full((3, layout.page_stride), 0xAB, dtype=torch.uint8)
    insert_window(kv, gain, positions, slots, table, pages, layout, eps=1e-6)
    normed = kv.float() * torch.rsqrt(kv.float().square().mean(-1, keepdim=True) + 1e-6) * gain
    latent = rotate(normed, table, positions.clamp(min=0).long()).to(dtype).float()
    kept = slots >= 0
    found = read_rows(pages, layout, slots[kept])
    expected = _round(layout, latent[kept])
    if dtype is torch.float32 and row_format is RowFormat.FLOAT32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:  # a last bit before the rounding may fall to the other side: one step of few lanes
        close = torch.isclose(found, expected, rtol=1e-6, atol=1e-7)
        assert close.float().mean() > 0.995
        torch.testing.assert_close(found, expected, rtol=0.13, atol=1e-2)
