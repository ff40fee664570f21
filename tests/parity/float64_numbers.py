"""Number formats and stored rows in numpy and ml_dtypes, byte by byte: nothing here is shared with the package.

T rows, D lanes, P rows of a page.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
FLOAT8 = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def numbers(tensor: torch.Tensor) -> Array:
    """A tensor of any float type as float64."""
    if tensor.dtype in FLOAT8:
        return tensor.view(torch.uint8).numpy().view(FLOAT8[tensor.dtype]).astype(np.float64)
    return tensor.detach().double().numpy()


def rounded(values: Array, kind: torch.dtype) -> Array:
    """float64 values after one rounding to an element type."""
    return values.astype(np.float32 if kind is torch.float32 else ml_dtypes.bfloat16).astype(np.float64)


def power_of_two_above(x: float) -> float:
    """The smallest power of two that is not below x."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)


def e4m3_round_trip(values: Array, group: int) -> Array:
    """Groups of the last axis through E4M3 with a power-of-two scale."""
    out = np.empty(values.shape)
    for row, target in zip(values.reshape(-1, values.shape[-1]), out.reshape(-1, values.shape[-1]), strict=True):
        for start in range(0, len(row), group):
            lanes = row[start : start + group]
            scale = power_of_two_above(max(np.abs(lanes).max(), float(np.float32(1e-4))) / 448)
            target[start : start + group] = (lanes / scale).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale
    return out


def e2m1_codes(values: Array) -> Array:
    """Codes of values within +-6: the nearest, and on a tie the one whose last bit is 0."""
    distance = np.abs(np.abs(values)[..., None] - E2M1[:8])
    nearest = distance == distance.min(-1, keepdims=True)
    even_first = np.where(np.arange(8) % 2 == 0, 0, 1)
    code = np.where(nearest, even_first, 9).argmin(-1)
    return (code | (np.signbit(values) << 3)).astype(np.uint8)


# ---- rows of a cache ------------------------------------------------------------------------------------------


def page_of(cache: Any, slot: int) -> tuple[Array, int]:
    """The bytes of a slot's page, and the row in it."""
    page, row = divmod(slot, cache.layout.page_rows)
    return cache.pages[page].numpy(), row


def codes_of(layout: Any) -> tuple[Any, int]:
    """E4M3 in the dialect of a layout, and how many times larger its scales are than those of OCP codes."""
    return (ml_dtypes.float8_e4m3fnuz, 2) if layout.fp8_dialect == "fnuz" else (ml_dtypes.float8_e4m3fn, 1)


def read_row(cache: Any, slot: int) -> Array:
    """float64 lanes of one row."""
    layout, (raw, s) = cache.layout, page_of(cache, slot)
    width, page_rows = layout.width, layout.page_rows
    e4m3, _ = codes_of(layout)
    if layout.format.value == "float32":
        return raw[s * 4 * width : (s + 1) * 4 * width].view("<f4").astype(np.float64)
    if layout.format.value == "bfloat16":
        return raw[s * 2 * width : (s + 1) * 2 * width].view(ml_dtypes.bfloat16).astype(np.float64)
    if layout.format.value == "fp8_row":
        scale = raw[page_rows * width + 4 * s :][:4].view("<f4").astype(np.float64)
        return raw[s * width : (s + 1) * width].view(e4m3).astype(np.float64) * scale
    if layout.format.value == "fp4_group32":
        packed = raw[s * width // 2 : (s + 1) * width // 2]
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1, 32)
        scales = raw[page_rows * width // 2 + s * width // 32 :][: width // 32]
        return (E2M1[codes] * 2.0 ** (scales[:, None].astype(np.float64) - 127)).reshape(-1)
    nope = width - layout.rope_width
    data = nope + 2 * layout.rope_width
    codes = raw[s * data : s * data + nope].view(e4m3).astype(np.float64).reshape(-1, 64)
    scales = raw[page_rows * data + 8 * s :][: nope // 64].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    tail = raw[s * data + nope : (s + 1) * data].view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate(((codes * scales[:, None]).reshape(-1), tail))


def write_row(cache: Any, slot: int, lanes: Array) -> None:
    """Rounds and stores one row of float64 lanes."""
    layout, (raw, s) = cache.layout, page_of(cache, slot)
    width, page_rows = layout.width, layout.page_rows
    e4m3, doubled = codes_of(layout)
    if layout.format.value == "float32":
        raw[s * 4 * width : (s + 1) * 4 * width] = lanes.astype("<f4").view(np.uint8)
    elif layout.format.value == "bfloat16":
        raw[s * 2 * width : (s + 1) * 2 * width] = lanes.astype(ml_dtypes.bfloat16).view(np.uint8)
    elif layout.format.value == "fp8_row":
        single = lanes.astype(np.float32)
        scale = np.maximum(np.abs(single).max(), np.float32(1e-8)) / np.float32(448)
        raw[s * width : (s + 1) * width] = (single / scale / np.float32(doubled)).astype(e4m3).view(np.uint8)
        raw[page_rows * width + 4 * s :][:4] = (scale * np.float32(doubled)).reshape(1).view(np.uint8)
    elif layout.format.value == "fp4_group32":
        for group, part in enumerate(lanes.reshape(-1, 32)):
            scale = power_of_two_above(max(np.abs(part).max(), 6 * 2.0**-126) / 6)
            codes = e2m1_codes(np.clip(part / scale, -6, 6))
            start = s * width // 2 + 16 * group
            raw[start : start + 16] = codes[0::2] | (codes[1::2] << 4)
            raw[page_rows * width // 2 + s * width // 32 + group] = round(math.log2(scale)) + 127
    else:
        nope = width - layout.rope_width
        data = nope + 2 * layout.rope_width
        for group, part in enumerate(lanes[:nope].reshape(-1, 64)):
            start = s * data + 64 * group
            if np.isnan(part).any():  # no finite scale: the row reads as NaN
                raw[start : start + 64], raw[page_rows * data + 8 * s + group] = 0x7F, 255
                continue
            scale = doubled * power_of_two_above(max(np.abs(part).max(), float(np.float32(1e-4))) / 448)
            raw[start : start + 64] = (part / scale).astype(e4m3).view(np.uint8)
            raw[page_rows * data + 8 * s + group] = round(math.log2(scale)) + 127
        raw[s * data + nope : (s + 1) * data] = lanes[nope:].astype(ml_dtypes.bfloat16).view(np.uint8)


# ---- weights --------------------------------------------------------------------------------------------------


def weight_values(weight: Any) -> Array:
    """float64 elements of a stored matrix or stack of matrices."""
    kind = weight.format.value
    if kind in ("float32", "bfloat16"):
        return numbers(weight.data)
    scale = weight.scale
    if scale.dtype == torch.uint8:
        steps = scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    else:
        steps = numbers(scale)
    *_, out, lanes = weight.shape
    if kind == "fp8_block":
        rows, columns = np.arange(out) // 128, np.arange(lanes) // 128
        return numbers(weight.data) * steps[..., rows, :][..., columns]
    packed = weight.data.view(torch.uint8).numpy()
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*weight.shape)
    values = E2M1[codes] * steps[..., np.arange(lanes) // (32 if kind == "mxfp4" else 16)]
    if kind == "nvfp4":
        values = values * numbers(weight.global_scale).reshape(*weight.shape[:-2], 1, 1)
    return values


# ---- rotation and transform -----------------------------------------------------------------------------------


def rotate(lanes: Array, table: torch.Tensor, position: int, *, back: bool = False) -> Array:
    """Turns adjacent pairs of the last lanes as complex numbers; leading axes turn alike."""
    turns = numbers(table[position])
    factor = turns[0::2] + (-1j if back else 1j) * turns[1::2]
    width = len(turns)
    tail = lanes[..., -width:]
    turned = (tail[..., 0::2] + 1j * tail[..., 1::2]) * factor
    out = lanes.copy()
    out[..., -width::2], out[..., lanes.shape[-1] - width + 1 :: 2] = turned.real, turned.imag
    return out


@functools.cache
def walsh_hadamard(width: int) -> Array:
    """The transform by its definition: (-1) ** popcount(i & j) / sqrt(width)."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(width)] for i in range(width)]) / math.sqrt(width)
