"""Device functions that find the K-th largest of float32 values: of many in memory, or of a tile in registers."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["MOST_IN_TILE", "kth_largest", "kth_largest_of_tile", "ordered_bits"]

MOST_IN_TILE = 32768  # values of a tile: two counts of so many share 32 bits


@triton.jit
def ordered_bits(x):
    """uint32 that orders as the float32 does, from -inf up; NaN of positive sign comes last."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(values_ptr, size, kept, BLOCK: tl.constexpr):
    """Ordered bits of the `kept`-th largest of `size` values, and how many of those equal to it belong to the kept.

    Eight bits at a time.
    """
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


@triton.jit
def _num_reaching(digits, counted, SIZE: tl.constexpr):
    """How many counted digits reach each of 0 to 7: uint32 (4,), two numbers of 16 bits in each, in no order.

    A digit adds 1 to each of its digit + 1 lowest fields of four bits. Fields hold the sums of eight digits, and then
    are taken apart: a sum over all threads is needed for four numbers alone.
    """
    fields = tl.where(counted, tl.full((), 0x11111111, tl.uint32) >> (28 - 4 * digits), 0)
    fields = tl.sum(tl.sum(tl.reshape(fields, (2, SIZE // 8, 4)), axis=2), axis=0)
    wider = tl.join(fields & 0x0F0F0F0F, (fields >> 4) & 0x0F0F0F0F)
    pairs = tl.join(wider & 0x00FF00FF, (wider >> 8) & 0x00FF00FF)
    return tl.sum(tl.reshape(pairs, (SIZE // 8, 4)), axis=0)


@triton.jit
def kth_largest_of_tile(bits, kept, SIZE: tl.constexpr):
    """Finds the `kept`-th largest of ordered bits (SIZE,), three bits at a time; what does not count has none set.

    Returns leading bits of it, the mask of these, and how many values that begin so belong to the kept: all of them,
    or the mask is full and they are equal.
    """
    prefix = tl.zeros((), tl.uint32)
    settled = tl.zeros((), tl.uint32)
    remaining = kept
    shift = 30  # of the highest digit two bits are there
    while shift >= 0:
        reaching = _num_reaching((bits >> shift) & 7, (bits & settled) == prefix, SIZE)
        low = (reaching & 65535).to(tl.int32)
        high = (reaching >> 16).to(tl.int32)
        digit = tl.sum((low >= remaining).to(tl.int32) + (high >= remaining).to(tl.int32), axis=0) - 1
        fewer = tl.maximum(tl.where(low < remaining, low, 0), tl.where(high < remaining, high, 0))
        enough = tl.minimum(tl.where(low >= remaining, low, SIZE), tl.where(high >= remaining, high, SIZE))
        is_last = tl.min(enough, axis=0) == remaining
        remaining -= tl.max(fewer, axis=0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
        settled = settled | (tl.full((), 7, tl.uint32) << shift)
        shift = tl.where(is_last, -1, shift - 3)
    return prefix, settled, remaining
