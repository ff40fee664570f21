"""Device functions that read and write cached rows in every row format, and the constants that a launcher passes.

A page is its rows' data, then its rows' scales. Byte offsets are 64-bit; a negative slot is neither read nor written.
"""

from __future__ import annotations

from typing import Any, Protocol

import triton
import triton.language as tl

from halocline.kernels_portable.number_codes import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    power_of_two,
    scale_exponent,
)

__all__ = ["PageLayout", "load_rows", "row_constants", "store_rows"]


class _Named(Protocol):
    @property
    def value(self) -> str: ...


class PageLayout(Protocol):
    """What a kernel must know of a cache; the HAL's own layout record is one.

    The value of `format` is `float32`, `bfloat16`, `fp8_block64`, `fp8_row` or `fp4_group32`.
    """

    @property
    def format(self) -> _Named:
        """How a row is stored."""
        ...

    @property
    def width(self) -> int:
        """Lanes of a row."""
        ...

    @property
    def rope_width(self) -> int:
        """Rotary lanes at its end."""
        ...

    @property
    def page_rows(self) -> int:
        """Rows in a page."""
        ...

    @property
    def page_stride(self) -> int:
        """Bytes from a page to the next."""
        ...

    @property
    def fp8_dialect(self) -> str:
        """`ocp`, `fnuz` or `none`."""
        ...


def row_constants(layout: PageLayout, prefix: str = "") -> dict[str, Any]:
    """Compile-time constants of a cache, by the names that kernels of this package use."""
    return {
        f"{prefix}FORMAT": layout.format.value,
        f"{prefix}PAGE_ROWS": layout.page_rows,
        f"{prefix}PAGE_STRIDE": layout.page_stride,
        f"{prefix}FNUZ": layout.fp8_dialect == "fnuz",
    }


@triton.jit
def _data_offset(slots, ROW_BYTES: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr):
    page = slots // PAGE_ROWS
    return page.to(tl.int64) * PAGE_STRIDE + (slots - page * PAGE_ROWS) * ROW_BYTES


@triton.jit
def _scale_offset(
    slots, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr
):
    page = slots // PAGE_ROWS
    return page.to(tl.int64) * PAGE_STRIDE + PAGE_ROWS * ROW_BYTES + (slots - page * PAGE_ROWS) * SCALE_BYTES


@triton.jit
def load_rows(
    pages_ptr, slots, mask, WIDTH: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values of cached rows.

    Args:
        pages_ptr: uint8 pages.
        slots: (ROWS,) slots.
        mask: (ROWS,) rows to read; the others are zeros.
        WIDTH: Lanes of a row.
        ROPE: Rotary lanes at its end.
        FORMAT: Row format.
        PAGE_ROWS: Rows in a page.
        PAGE_STRIDE: Bytes from a page to the next.
        FNUZ: Whether E4M3 codes are FNUZ.
        ROWS: Rows of the tile.
        LANES: Lanes of the tile, a power of two; lanes at and behind WIDTH are zeros.
        DTYPE: Element type of the result; every format but float32 is exact in bfloat16 up to its scale's product.

    Returns:
        (ROWS, LANES) of DTYPE.
    """
    if FORMAT == "float32" or FORMAT == "bfloat16":  # noqa: PLR1714 (Triton has no sets)
        size: tl.constexpr = 4 if FORMAT == "float32" else 2
        kind: tl.constexpr = tl.float32 if FORMAT == "float32" else tl.bfloat16
        lanes = tl.arange(0, LANES)[None, :]
        rows_ptr = (pages_ptr + _data_offset(slots, size * WIDTH, PAGE_ROWS, PAGE_STRIDE)).to(tl.pointer_type(kind))
        values = tl.load(rows_ptr[:, None] + lanes, mask=mask[:, None] & (lanes < WIDTH), other=0.0)
    elif FORMAT == "fp8_block64":
        values = _load_latents(pages_ptr, slots, mask, WIDTH, ROPE, PAGE_ROWS, PAGE_STRIDE, FNUZ, ROWS, LANES)
    elif FORMAT == "fp8_row":
        lanes = tl.arange(0, LANES)[None, :]
        data = _data_offset(slots, WIDTH, PAGE_ROWS, PAGE_STRIDE)
        codes = tl.load(pages_ptr + data[:, None] + lanes, mask=mask[:, None] & (lanes < WIDTH), other=0)
        scales_ptr = pages_ptr + _scale_offset(slots, WIDTH, 4, PAGE_ROWS, PAGE_STRIDE)
        scales = tl.load(scales_ptr.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
        values = decode_e4m3(codes, FNUZ) * scales[:, None]
    else:
        tl.static_assert(FORMAT == "fp4_group32")
        values = _load_fp4(pages_ptr, slots, mask, WIDTH, PAGE_ROWS, PAGE_STRIDE, ROWS, LANES)
    return values.to(DTYPE)


@triton.jit
def _load_latents(
    pages_ptr, slots, mask, WIDTH: tl.constexpr, ROPE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    NOPE: tl.constexpr = WIDTH - ROPE
    ROW_BYTES: tl.constexpr = NOPE + 2 * ROPE
    SCALE_BYTES: tl.constexpr = (NOPE // 64 + 7) // 8 * 8
    group = tl.arange(0, LANES // 64)[None, :, None]
    lane = group * 64 + tl.arange(0, 64)[None, None, :]
    present = mask[:, None, None]
    is_code = group < NOPE // 64
    data = _data_offset(slots, ROW_BYTES, PAGE_ROWS, PAGE_STRIDE)[:, None, None]
    scale = _scale_offset(slots, ROW_BYTES, SCALE_BYTES, PAGE_ROWS, PAGE_STRIDE)[:, None, None]
    codes = tl.load(pages_ptr + (data + lane), mask=present & is_code & (lane < NOPE), other=0)
    exponents = tl.load(pages_ptr + (scale + group), mask=present & is_code, other=0)
    steps = power_of_two(exponents.to(tl.int32) - 127)
    tail_ptr = (pages_ptr + (data + NOPE)).to(tl.pointer_type(tl.bfloat16))
    tail = tl.load(tail_ptr + (lane - NOPE), mask=present & (lane >= NOPE) & (lane < WIDTH), other=0.0)
    values = tl.where(is_code, decode_e4m3(codes, FNUZ) * steps, tail.to(tl.float32))
    return tl.reshape(values, (ROWS, LANES))


@triton.jit
def _load_fp4(
    pages_ptr, slots, mask, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, LANES // 32)[None, :, None]
    byte = group * 16 + tl.arange(0, 16)[None, None, :]
    present = mask[:, None, None] & (group < WIDTH // 32)
    data = _data_offset(slots, WIDTH // 2, PAGE_ROWS, PAGE_STRIDE)[:, None, None]
    scale = _scale_offset(slots, WIDTH // 2, WIDTH // 32, PAGE_ROWS, PAGE_STRIDE)[:, None, None]
    packed = tl.load(pages_ptr + (data + byte), mask=present & (byte < WIDTH // 2), other=0)
    exponents = tl.load(pages_ptr + (scale + group), mask=present, other=0)
    steps = power_of_two(exponents.to(tl.int32) - 127)
    values = tl.join(decode_e2m1(packed & 0xF) * steps, decode_e2m1(packed >> 4) * steps)
    return tl.reshape(values, (ROWS, LANES))


@triton.jit
def store_rows(
    pages_ptr, slots, mask, values, WIDTH: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rounds float32 (ROWS, LANES) values to a row format and stores the rows of `mask`; arguments as `load_rows`."""
    lanes = tl.arange(0, LANES)[None, :]
    if FORMAT == "float32" or FORMAT == "bfloat16":  # noqa: PLR1714 (Triton has no sets)
        size: tl.constexpr = 4 if FORMAT == "float32" else 2
        kind: tl.constexpr = tl.float32 if FORMAT == "float32" else tl.bfloat16
        rows_ptr = (pages_ptr + _data_offset(slots, size * WIDTH, PAGE_ROWS, PAGE_STRIDE)).to(tl.pointer_type(kind))
        tl.store(rows_ptr[:, None] + lanes, values.to(kind), mask=mask[:, None] & (lanes < WIDTH))
    elif FORMAT == "fp8_block64":
        _store_latents(pages_ptr, slots, mask, values, WIDTH, ROPE, PAGE_ROWS, PAGE_STRIDE, FNUZ, ROWS, LANES)
    elif FORMAT == "fp8_row":
        amax = tl.max(tl.abs(values), axis=1)
        scales = tl.div_rn(tl.maximum(amax, 1e-8), 448.0)
        codes = encode_e4m3(tl.div_rn(values, tl.broadcast_to(scales[:, None], (ROWS, LANES))), FNUZ)
        data = _data_offset(slots, WIDTH, PAGE_ROWS, PAGE_STRIDE)
        tl.store(pages_ptr + data[:, None] + lanes, codes, mask=mask[:, None] & (lanes < WIDTH))
        scales_ptr = pages_ptr + _scale_offset(slots, WIDTH, 4, PAGE_ROWS, PAGE_STRIDE)
        tl.store(scales_ptr.to(tl.pointer_type(tl.float32)), scales * (2.0 if FNUZ else 1.0), mask=mask)
    else:
        tl.static_assert(FORMAT == "fp4_group32")
        _store_fp4(pages_ptr, slots, mask, values, WIDTH, PAGE_ROWS, PAGE_STRIDE, ROWS, LANES)


@triton.jit
def _store_latents(
    pages_ptr, slots, mask, values, WIDTH: tl.constexpr, ROPE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    NOPE: tl.constexpr = WIDTH - ROPE
    GROUPS: tl.constexpr = NOPE // 64
    ROW_BYTES: tl.constexpr = NOPE + 2 * ROPE
    SCALE_BYTES: tl.constexpr = (GROUPS + 7) // 8 * 8
    BYTES: tl.constexpr = triton.next_power_of_2(SCALE_BYTES) if LANES // 64 < SCALE_BYTES else LANES // 64
    grouped = tl.reshape(values, (ROWS, LANES // 64, 64))
    exponent = scale_exponent(tl.maximum(tl.max(tl.abs(grouped), axis=2), 1e-4), 0x43E00000)
    codes = encode_e4m3(grouped * power_of_two(-exponent)[:, :, None], FNUZ)
    group = tl.arange(0, LANES // 64)[None, :]
    lane = group[:, :, None] * 64 + tl.arange(0, 64)[None, None, :]
    data = _data_offset(slots, ROW_BYTES, PAGE_ROWS, PAGE_STRIDE)
    tl.store(pages_ptr + data[:, None, None] + lane, codes, mask=mask[:, None, None] & (lane < NOPE))
    tail_ptr = (pages_ptr + data + NOPE).to(tl.pointer_type(tl.bfloat16))[:, None, None] + (lane - NOPE)
    tl.store(tail_ptr, grouped.to(tl.bfloat16), mask=mask[:, None, None] & (lane >= NOPE) & (lane < WIDTH))
    scale = _scale_offset(slots, ROW_BYTES, SCALE_BYTES, PAGE_ROWS, PAGE_STRIDE)[:, None]
    stored = (exponent + (128 if FNUZ else 127)).to(tl.uint8)
    tl.store(pages_ptr + scale + group, stored, mask=mask[:, None] & (group < GROUPS))
    byte = tl.arange(0, BYTES)[None, :]
    unused = mask[:, None] & (byte >= GROUPS) & (byte < SCALE_BYTES)
    tl.store(pages_ptr + scale + byte, tl.zeros((ROWS, BYTES), tl.uint8), mask=unused)


@triton.jit
def _store_fp4(
    pages_ptr, slots, mask, values, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    grouped = tl.reshape(values, (ROWS, LANES // 32, 32))
    amax = tl.maximum(tl.max(tl.abs(grouped), axis=2), 7.052966104933725e-38)  # 6 * 2 ** -126
    exponent = scale_exponent(amax, 0x40C00000)
    codes = encode_e2m1(grouped * power_of_two(-exponent)[:, :, None])
    low, high = tl.split(tl.reshape(codes, (ROWS, LANES // 2, 2)))
    byte = tl.arange(0, LANES // 2)[None, :]
    data = _data_offset(slots, WIDTH // 2, PAGE_ROWS, PAGE_STRIDE)[:, None]
    tl.store(pages_ptr + data + byte, (low | (high << 4)).to(tl.uint8), mask=mask[:, None] & (byte < WIDTH // 2))
    group = tl.arange(0, LANES // 32)[None, :]
    scale = _scale_offset(slots, WIDTH // 2, WIDTH // 32, PAGE_ROWS, PAGE_STRIDE)[:, None]
    tl.store(pages_ptr + scale + group, (exponent + 127).to(tl.uint8), mask=mask[:, None] & (group < WIDTH // 32))
