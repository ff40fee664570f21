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
    """The transform of one float32 row (1, WIDTH), by sums and differences of lanes whose numbers differ in one bit.

    A product with the signs would leave every lane's result in many threads, and what follows would be done in each.
    """
    lanes = tl.arange(0, WIDTH)[None, :]
    for bit in tl.static_range(16):
        if (1 << bit) < WIDTH:
            partner = tl.gather(x, lanes ^ (1 << bit), axis=1)
            x = partner + tl.where((lanes & (1 << bit)) == 0, x, -x)
    return x * (WIDTH**-0.5)
