"""Number formats in tilelang programs, by bit arithmetic, as `number_codes` reads them in Triton."""

from __future__ import annotations

from typing import Any

import tilelang.language as T  # noqa: N812 (its own idiom)

__all__ = ["decode_e4m3", "power_of_two"]


def decode_e4m3(code: Any, fnuz: bool) -> Any:
    """float32 expression of a uint16 E4M3 code; no conversion instruction is needed, so both dialects work anywhere."""
    bits = ((code & T.uint16(0x80)) << T.uint16(8)) | ((code & T.uint16(0x7F)) << T.uint16(7))
    half = T.reinterpret(bits, "float16")
    return T.Cast("float32", half) * T.float32(128.0 if fnuz else 256.0)


def power_of_two(byte: Any) -> Any:
    """float32 expression of a uint32 UE8M0 byte: 2 ** (byte - 127), and 0 for byte 0."""
    return T.reinterpret(byte << T.uint32(23), "float32")
