"""Device functions that find the K-th largest of many float32 values, eight bits at a time."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["kth_largest", "ordered_bits"]


@triton.jit
def ordered_bits(x):
    """uint32 that orders as the float32 does, from -inf up; NaN of positive sign comes last."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(values_ptr, size, kept, BLOCK: tl.constexpr):
    """Ordered bits of the `kept`-th largest of `size` values, and how many of those equal to it belong to the kept."""
    prefix = tl.zeros((), tl.uint32)
    settled = tl.zeros((), tl.uint32)
    remaining = kept
    digits = tl.arange(0, 256)
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, size, BLOCK):
            places = start + tl.arange(0, BLOCK)
            bits = ordered_bits(tl.load(values_ptr + places, mask=places < size, other=0.0))
            candidate = (places < size) & ((bits & settled) == prefix)
            counts += tl.histogram(((bits >> shift) & 255).to(tl.int32), 256, mask=candidate)
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        digit = tl.sum((at_least >= remaining).to(tl.int32), axis=0) - 1
        remaining -= tl.sum(tl.where(digits > digit, counts, 0), axis=0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
        settled = settled | (tl.full((), 255, tl.uint32) << shift)
    return prefix, remaining
