"""Device functions that read and write number formats by bit arithmetic: E4M3, E2M1 and powers of two.

Nothing here depends on a conversion instruction, so both FP8 dialects work on every device and in the interpreter.
FNUZ codes of this project carry half the value of the OCP code of the same byte and lie under twice the scale: a number
that is written in either dialect is read back as the same number.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "encode_e2m1",
    "encode_e4m3",
    "exact_bfloat16",
    "power_of_two",
    "scale_exponent",
]


@triton.jit
def power_of_two(exponent):
    """float32 2 ** exponent for int32 exponents from -126 to 127; -127 gives 0."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(amax, LIMIT_BITS: tl.constexpr):
    """Smallest exponent e with amax <= limit * 2 ** e, on the bits: exact powers of two stay what they are.

    LIMIT_BITS are the float32 bits of the format's largest value: 0x43E00000 for 448, 0x40C00000 for 6.
    """
    return (amax.to(tl.int32, bitcast=True) - LIMIT_BITS + 0x7FFFFF) >> 23


@triton.jit
def decode_e4m3(codes, FNUZ: tl.constexpr):
    """float32 values of uint8 E4M3 codes. Writers of this project store no NaN code; one would read as a number."""
    wide = codes.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * (128.0 if FNUZ else 256.0)


@triton.jit
def encode_e4m3(x, FNUZ: tl.constexpr):
    """uint8 E4M3 codes of float32 values that are already divided by the OCP scale; saturates at 448 (FNUZ: 224).

    Rounds to the nearest, ties to even. The FNUZ byte of x / 2 is the OCP byte of x, but for -0, which is 0.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2 ** -6 the step is 2 ** -9: adding 2 ** 14, whose last bit has that weight, rounds to it.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e2m1(codes):
    """float32 values of E2M1 codes, 0 to 15 in any integer type."""
    wide = codes.to(tl.uint16)
    half = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def encode_e2m1(x):
    """E2M1 codes as int32 of float32 values that are already divided by their scale; saturates at 6, ties to even."""
    magnitude = tl.abs(x)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32)
    code += (magnitude >= 3.5).to(tl.int32) + (magnitude > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def exact_bfloat16(x):
    """bfloat16 of float32 values that bfloat16 holds exactly: takes the high half without a rounding."""
    high = (x.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def split_float32(x):
    """Three bfloat16 numbers, largest first, whose sum is the float32 `x`: products with them use matrix units."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low
