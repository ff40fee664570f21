"""Device functions that rotate adjacent lane pairs of rows by their positions."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pair_turns", "swap_pairs", "turn_pairs"]


@triton.jit
def swap_pairs(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Exchanges lanes 2i and 2i + 1 of a (ROWS, LANES) tile."""
    even, odd = tl.split(tl.reshape(x, (ROWS, LANES // 2, 2)))
    return tl.reshape(tl.join(odd, even), (ROWS, LANES))


@triton.jit
def pair_turns(positions, table_ptr, FIRST: tl.constexpr, ROPE: tl.constexpr, LANES: tl.constexpr):
    """Cosine and sine of each lane of a tile, float32 (ROWS, LANES); 1 and 0 on lanes that do not rotate.

    Args:
        positions: int32 (ROWS,), none negative.
        table_ptr: float32 (positions, ROPE): cosine and sine of pair i at lanes 2i and 2i + 1.
        FIRST: First rotary lane, even.
        ROPE: Rotary lanes.
        LANES: Lanes of the tile.
    """
    lanes = tl.arange(0, LANES)[None, :]
    is_rotary = (lanes >= FIRST) & (lanes < FIRST + ROPE)
    entry = table_ptr + positions.to(tl.int64)[:, None] * ROPE + (lanes - (lanes & 1) - FIRST)
    return tl.load(entry, mask=is_rotary, other=1.0), tl.load(entry + 1, mask=is_rotary, other=0.0)


@triton.jit
def turn_pairs(x, cos, sin, INVERSE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Rotates a float32 (ROWS, LANES) tile by what `pair_turns` gave, or back."""
    partner = swap_pairs(x, ROWS, LANES)
    # The even lane is real: real * cos - imaginary * sin; the odd one imaginary: imaginary * cos + real * sin.
    in_pair = tl.arange(0, LANES)[None, :] & 1
    forwards = (in_pair == 0) if INVERSE else (in_pair == 1)
    return x * cos + partner * tl.where(forwards, sin, -sin)
