"""The bytes of cached rows, written out by hand: which byte lies where in a page, in every layout and page size.

The offsets are those of the published layouts: 584-byte latent rows, 132-byte and 68-byte index keys.
"""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from halocline.backends_reference.kv_cache import allocate_reference, read_rows_reference, write_rows_reference
from halocline.hal.errors import ShapeError
from halocline.hal.formats import CacheLayout, RowFormat, cache_layout
from halocline.hal.ops.kv_cache import CacheHandle

PAGES = 3
PAGE_SIZES = (2, 64, 256)
ALL_FORMATS = [
    ("latent", "float32", 512),
    ("latent", "bfloat16", 512),
    ("latent", "fp8_block64", 512),
    ("index_key", "float32", 128),
    ("index_key", "bfloat16", 128),
    ("index_key", "fp8_row", 128),
    ("index_key", "fp4_group32", 128),
]


def layout_of(kind: Any, stored: str, width: int, page_rows: int) -> CacheLayout:
    rope = 64 if kind == "latent" else 0
    return cache_layout(kind, RowFormat(stored), width=width, rope_width=rope, page_rows=page_rows)


def written(layout: CacheLayout, slot: int, row: Tensor) -> Tensor:
    """All bytes of a cache in which one row was stored over bytes of 0xEE."""
    cache = allocate_reference(layout, PAGES, device="cpu")
    cache.pages.fill_(0xEE)
    write_rows_reference(cache, torch.tensor([slot]), row[None])
    return cache.pages.flatten()


def expect(found: Tensor, expected: dict[int, int]) -> None:
    """The bytes at these addresses, and 0xEE at all others."""
    changed = {address: int(found[address]) for address in (found != 0xEE).nonzero()[:, 0].tolist()}
    assert {address: byte for address, byte in expected.items() if byte != 0xEE} == changed


@pytest.mark.parametrize(("page_rows", "stride"), [(2, 1728), (64, 37_440), (128, 74_880), (256, 149_760)])
def test_strides_of_latent_pages(page_rows: int, stride: int) -> None:
    layout = layout_of("latent", "fp8_block64", 512, page_rows)
    assert (layout.row_bytes, layout.page_stride) == (584, stride)


def test_strides_of_index_pages() -> None:
    eight_bit = layout_of("index_key", "fp8_row", 128, 64)
    four_bit = layout_of("index_key", "fp4_group32", 128, 64)
    assert (eight_bit.row_bytes, eight_bit.page_stride) == (132, 8448)
    assert (four_bit.row_bytes, four_bit.page_stride) == (68, 4352)


@pytest.mark.parametrize("page_rows", PAGE_SIZES)
def test_a_latent_row_byte_by_byte(page_rows: int) -> None:
    """Groups of 64 lanes whose largest value is 448 * 2**g: the scale is 2**g, its byte 127 + g."""
    page, in_page = 1, page_rows - 1
    start = page * {2: 1728, 64: 37_440, 256: 149_760}[page_rows]
    row = torch.zeros(512)
    expected: dict[int, int] = {}
    for lane in range(448):
        expected[start + in_page * 576 + lane] = 0x00
    for group in range(7):
        first = 64 * group
        row[first], row[first + 1], row[first + 2] = 448.0 * 2**group, 2.0**group, -1.5 * 2**group
        expected[start + in_page * 576 + first] = 0x7E  # 448 = 1.75 * 2**8: 0 1111 110
        expected[start + in_page * 576 + first + 1] = 0x38  # 1: 0 0111 000
        expected[start + in_page * 576 + first + 2] = 0xBC  # -1.5: 1 0111 100
        expected[start + page_rows * 576 + in_page * 8 + group] = 127 + group
    expected[start + page_rows * 576 + in_page * 8 + 7] = 0  # unused
    for lane in range(64):
        value = (-1) ** lane * (lane + 0.5)
        row[448 + lane] = value
        # bfloat16 is the upper half of float32, here without anything below it.
        low, high = struct.pack("<f", value)[2:]
        expected[start + in_page * 576 + 448 + 2 * lane] = low
        expected[start + in_page * 576 + 448 + 2 * lane + 1] = high
    expect(written(layout_of("latent", "fp8_block64", 512, page_rows), page * page_rows + in_page, row), expected)


@pytest.mark.parametrize("page_rows", PAGE_SIZES)
def test_an_eight_bit_index_key_byte_by_byte(page_rows: int) -> None:
    """The largest value is 3 * 448: the scale is 3, no power of two, stored as float32 behind all keys of the page."""
    page, in_page = 2, 1
    start = page * page_rows * 132
    row = torch.zeros(128)
    row[0], row[5], row[127] = 3 * 448.0, -3.0, 3 * 0.5
    expected = {start + in_page * 128 + lane: 0x00 for lane in range(128)}
    expected[start + in_page * 128] = 0x7E
    expected[start + in_page * 128 + 5] = 0xB8
    expected[start + in_page * 128 + 127] = 0x30
    for place, byte in enumerate(struct.pack("<f", 3.0)):
        expected[start + page_rows * 128 + 4 * in_page + place] = byte
    expect(written(layout_of("index_key", "fp8_row", 128, page_rows), page * page_rows + in_page, row), expected)


@pytest.mark.parametrize("page_rows", PAGE_SIZES)
def test_a_four_bit_index_key_byte_by_byte(page_rows: int) -> None:
    """Even lanes lie in low nibbles; group g has the scale 2**(g - 1), byte 126 + g."""
    page, in_page = 1, page_rows - 1
    start = page * page_rows * 68
    row = torch.zeros(128)
    expected = {start + in_page * 64 + place: 0x00 for place in range(64)}
    for group in range(4):
        step = 2.0 ** (group - 1)
        row[32 * group], row[32 * group + 1], row[32 * group + 31] = 6 * step, -0.5 * step, 3 * step
        expected[start + in_page * 64 + 16 * group] = 0x97  # low nibble 7 = 6, high nibble 9 = -0.5
        expected[start + in_page * 64 + 16 * group + 15] = 0x50  # low nibble 0, high nibble 5 = 3
        expected[start + page_rows * 64 + 4 * in_page + group] = 126 + group
    expect(written(layout_of("index_key", "fp4_group32", 128, page_rows), page * page_rows + in_page, row), expected)


@pytest.mark.parametrize("page_rows", PAGE_SIZES)
@pytest.mark.parametrize(("stored", "size"), [("float32", 4), ("bfloat16", 2)])
def test_plain_rows_lie_one_behind_the_other(stored: str, size: int, page_rows: int) -> None:
    slot = page_rows + 1
    row = torch.arange(1, 129).float()
    kind: Any = np.float32 if stored == "float32" else ml_dtypes.bfloat16
    content = np.arange(1, 129).astype(kind).tobytes()
    expected = {slot * 128 * size + place: byte for place, byte in enumerate(content)}
    found = written(layout_of("index_key", stored, 128, page_rows), slot, row)
    assert {a: int(found[a]) for a in expected} == expected
    expected |= {address: 0xEE for address in range(found.numel()) if address not in expected}
    assert found.tolist() == [expected[address] for address in range(found.numel())]


def random_page(layout: CacheLayout, rng: np.random.Generator) -> Tensor:
    """A page whose groups all hold their format's largest code, so that each scale is the only possible one."""
    rows, width = layout.page_rows, layout.width
    page = np.zeros(layout.page_stride, dtype=np.uint8)
    if layout.format is RowFormat.FP4_GROUP32:
        codes = rng.integers(0, 256, (rows, 4, 16))
        codes[:, :, 3] = codes[:, :, 3] & 0xF0 | 7
        page[: rows * 64] = codes.reshape(-1)
        page[rows * 64 : rows * 68] = rng.integers(100, 150, rows * 4)
        return torch.from_numpy(page)
    numbers = rng.integers(0, 0x7F, (rows, width)) | rng.integers(0, 2, (rows, width)) << 7
    numbers[:, 3::64] = 0x7E
    if layout.format is RowFormat.FP8_ROW:
        page[: rows * width] = numbers.reshape(-1)
        # Few bits, so that 448 times the scale is exact.
        scales = rng.integers(1, 16, rows) * 2.0 ** rng.integers(-10, 10, rows)
        page[rows * width :] = scales.astype(np.float32).view(np.uint8)
        return torch.from_numpy(page)
    tails = rng.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16)
    page[: rows * 576] = np.concatenate((numbers[:, :448].astype(np.uint8), tails.view(np.uint8)), axis=1).reshape(-1)
    scale_bytes = rng.integers(110, 150, (rows, 8))
    scale_bytes[:, 7] = 0
    page[rows * 576 : rows * 584] = scale_bytes.reshape(-1)
    return torch.from_numpy(page)


@pytest.mark.parametrize("page_rows", PAGE_SIZES)
@pytest.mark.parametrize(("kind", "stored", "width"), [row for row in ALL_FORMATS if row[1].startswith("fp")])
def test_packed_rows_survive_bit_by_bit(kind: str, stored: str, width: int, page_rows: int) -> None:
    """Bytes, values, the same bytes."""
    layout = layout_of(kind, stored, width, page_rows)
    rng = np.random.default_rng(page_rows)
    first, second = (allocate_reference(layout, PAGES, device="cpu") for _ in range(2))
    for page in first.pages:
        page.copy_(random_page(layout, rng))
    slots = torch.from_numpy(rng.permutation(PAGES * page_rows))
    write_rows_reference(second, slots.int(), read_rows_reference(first, slots))
    assert torch.equal(first.pages, second.pages)


@pytest.mark.parametrize("page_rows", PAGE_SIZES)
@pytest.mark.parametrize(("kind", "stored", "width"), ALL_FORMATS)
def test_rounding_is_small_and_happens_once(kind: str, stored: str, width: int, page_rows: int) -> None:
    layout = layout_of(kind, stored, width, page_rows)
    gen = torch.Generator().manual_seed(page_rows)
    rows = torch.randn(PAGES * page_rows, width, generator=gen) * torch.logspace(-5, 4, PAGES * page_rows)[:, None]
    slots = torch.randperm(PAGES * page_rows, generator=gen)
    first, second = (allocate_reference(layout, PAGES, device="cpu") for _ in range(2))
    write_rows_reference(first, slots, rows)
    values = read_rows_reference(first, slots)
    write_rows_reference(second, slots.flip(0), values.flip(0))
    assert torch.equal(read_rows_reference(second, slots), values)
    largest = {"float32": 0.0, "bfloat16": 2**-8, "fp8_block64": 2**-4, "fp8_row": 2**-4, "fp4_group32": 0.25}[stored]
    assert ((values - rows).abs().amax(1) <= largest * rows.abs().amax(1)).all()


class TestSlots:
    """What is written where, and what is not."""

    def test_guard_rows_survive_and_minus_one_writes_nothing(self, make_cache: Any) -> None:
        cache = make_cache(torch.full((8, 4), 9.0), num_pages=2)
        write_rows_reference(cache, torch.tensor([2, -1, 5]), torch.tensor([[1.0] * 4, [2.0] * 4, [3.0] * 4]))
        expected = torch.full((8, 4), 9.0)
        expected[2], expected[5] = 1.0, 3.0
        assert torch.equal(read_rows_reference(cache, torch.arange(8)), expected)

    def test_minus_one_reads_zeros(self, make_cache: Any) -> None:
        cache = make_cache(torch.full((8, 4), 9.0), num_pages=2)
        assert read_rows_reference(cache, torch.tensor([-1, 7, -1])).tolist() == [[0.0] * 4, [9.0] * 4, [0.0] * 4]

    def test_a_slot_behind_the_cache_is_refused(self, make_cache: Any) -> None:
        cache = make_cache(width=4, num_pages=2)
        for use in (
            lambda slots: read_rows_reference(cache, slots),
            lambda slots: write_rows_reference(cache, slots, torch.zeros(len(slots), 4)),
        ):
            use(torch.tensor([7]))
            with pytest.raises(ShapeError, match="slot 8 lies behind a cache of 2 pages of 4 rows"):
                use(torch.tensor([0, 8]))

    def test_rows_of_another_width_are_refused(self, make_cache: Any) -> None:
        with pytest.raises(ShapeError, match=r"rows of shape \(1, 5\) for 1 slots of 4 lanes"):
            write_rows_reference(make_cache(width=4), torch.tensor([0]), torch.zeros(1, 5))

    @pytest.mark.parametrize("kind", [torch.int32, torch.int64])
    def test_offsets_beyond_32_bits(self, kind: torch.dtype) -> None:
        """A pool of 4.49 GB, of which only the touched pages take memory: page 15,000 begins at byte 2,246,400,000."""
        layout = layout_of("latent", "fp8_block64", 512, 256)
        pages = torch.empty((30_000, layout.page_stride), dtype=torch.uint8)
        cache = CacheHandle(layout=layout, num_pages=30_000, pages=pages)
        rows = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
        slots = torch.tensor([0, 14_339 * 256 + 9, 15_000 * 256, 30_000 * 256 - 1])
        write_rows_reference(cache, slots.to(kind), rows)
        flat = pages.view(-1)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            data = slot // 256 * 149_760 + slot % 256 * 576
            tail = flat[data + 448 : data + 576].view(torch.bfloat16)
            assert torch.equal(tail, row[448:].bfloat16())
            scale = slot // 256 * 149_760 + 256 * 576 + slot % 256 * 8
            assert flat[scale : scale + 8].tolist() == [*flat[scale : scale + 7].tolist(), 0]
        data = 29_999 * 149_760 + 255 * 576
        assert data > 2**32
        found = read_rows_reference(cache, slots.to(kind))
        assert ((found - rows).abs() <= 2**-4 * rows.abs().clamp_min(2**-4)).all()
