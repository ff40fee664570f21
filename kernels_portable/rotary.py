"""Device function that rotates adjacent lane pairs of rows by their positions."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rotate_pairs", "swap_pairs"]


@triton.jit
def swap_pairs(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Exchanges lanes 2i and 2i + 1 of a (ROWS, LANES) tile."""
    even, odd = tl.split(tl.reshape(x, (ROWS, LANES // 2, 2)))
    return tl.reshape(tl.join(odd, even), (ROWS, LANES))


@triton.jit
def rotate_pairs(
    x, positions, table_ptr, FIRST: tl.constexpr, ROPE: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rotates lanes [FIRST, FIRST + ROPE) of a float32 (ROWS, LANES) tile; the other lanes stay.

    Args:
        x: Tile.
        positions: int32 (ROWS,), none negative.
        table_ptr: float32 (positions, ROPE): cosine and sine of pair i at lanes 2i and 2i + 1.
        FIRST: First rotary lane, even.
        ROPE: Rotary lanes.
        INVERSE: Rotate back.
        ROWS: Rows of the tile.
        LANES: Lanes of the tile.
    """
    partner = swap_pairs(x, ROWS, LANES)
    lanes = tl.arange(0, LANES)[None, :]
    in_pair = lanes & 1
    is_rotary = (lanes >= FIRST) & (lanes < FIRST + ROPE)
    entry = table_ptr + positions.to(tl.int64)[:, None] * ROPE + (lanes - in_pair - FIRST)
    cos = tl.load(entry, mask=is_rotary, other=1.0)
    sin = tl.load(entry + 1, mask=is_rotary, other=0.0)
    # The even lane is real: real * cos - imaginary * sin; the odd one imaginary: imaginary * cos + real * sin.
    forwards = (in_pair == 0) if INVERSE else (in_pair == 1)
    return x * cos + partner * tl.where(forwards, sin, -sin)
