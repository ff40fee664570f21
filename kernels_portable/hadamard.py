"""Device functions of the normalised Walsh-Hadamard transform in natural (Sylvester) order, for powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["hadamard_signs", "transform_row"]


@triton.jit
def hadamard_signs(WIDTH: tl.constexpr):
    """float32 (WIDTH, WIDTH) of (-1) ** popcount(i & j)."""
    both = tl.arange(0, WIDTH)[:, None] & tl.arange(0, WIDTH)[None, :]
    both ^= both >> 8
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def transform_row(x, WIDTH: tl.constexpr):
    """The transform of one float32 row (1, WIDTH), summed in float32."""
    transformed = tl.sum(hadamard_signs(WIDTH) * x, axis=1) * (WIDTH**-0.5)
    return tl.reshape(transformed, (1, WIDTH))
