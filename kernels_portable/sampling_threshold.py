"""Restriction of a distribution to its largest logits: top-k, then top-p, then min-p. R rows, V vocabulary.

Each restriction keeps the logits from some value up, so all of them together are one threshold for each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.radix_search import kth_largest, ordered_bits

__all__ = ["sampling_thresholds"]

_BLOCK = 2048


@triton.jit
def _value_of_bits(bits):
    """The float32 whose ordered bits these are."""
    signed = bits.to(tl.int32, bitcast=True)
    return tl.where(signed < 0, signed ^ -2147483648, ~signed).to(tl.float32, bitcast=True)


@triton.jit
def _nucleus(logits_ptr, temperature, largest, lowest, top_p, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Ordered bits of the smallest value above which less than `top_p` of the mass of [lowest, ...) lies.

    Four bits at a time: the first of sixteen bounds that has less than the wanted mass above it is kept.
    """
    total = 0.0
    for start in range(0, VOCABULARY, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.div_rn(tl.load(logits_ptr + ids, mask=ids < VOCABULARY, other=float("-inf")), temperature)
        total += tl.sum(tl.where(x >= lowest, tl.exp(x - largest), 0.0), axis=0)
    digits = tl.arange(0, 16)
    prefix = tl.zeros((), tl.uint32)
    for step in range(8):
        shift = 28 - 4 * step
        ones = (tl.full((), 1, tl.uint32) << shift) - 1
        bounds = prefix | (digits.to(tl.uint32) << shift) | ones
        above = tl.zeros((16,), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.div_rn(tl.load(logits_ptr + ids, mask=ids < VOCABULARY, other=float("-inf")), temperature)
            share = tl.where(x >= lowest, tl.exp(x - largest), 0.0)
            above += tl.sum(tl.where(ordered_bits(x)[:, None] > bounds[None, :], share[:, None], 0.0), axis=0)
        digit = tl.min(tl.where(above < top_p * total, digits, 15), axis=0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
    return prefix


@triton.jit
def _sampling_thresholds_kernel(
    logits_ptr, logits_stride, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, thresholds_ptr,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    logits_ptr += row * logits_stride
    lowest = float("-inf")
    limits_k = (top_k > 0) & (top_k < VOCABULARY)
    if (temperature > 0) & (limits_k | (top_p < 1.0) | (min_p > 0.0)):
        largest = float("-inf")
        for start in range(0, VOCABULARY, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + ids, mask=ids < VOCABULARY, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(x, axis=0))
        largest = tl.div_rn(largest, temperature)
        if limits_k:
            bits, _ = kth_largest(logits_ptr, VOCABULARY, top_k, BLOCK)
            lowest = tl.div_rn(_value_of_bits(bits), temperature)
        if top_p < 1.0:
            bits = _nucleus(logits_ptr, temperature, largest, lowest, top_p, VOCABULARY, BLOCK)
            lowest = tl.minimum(tl.maximum(lowest, _value_of_bits(bits)), largest)
        if min_p > 0.0:
            lowest = tl.maximum(lowest, largest + tl.log(min_p))
    tl.store(thresholds_ptr + row, lowest)


def sampling_thresholds(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Smallest logit over temperature that each row keeps.

    Args:
        logits_RV: float32, ids contiguous.
        temperature_R: float32; rows of 0 are not restricted.
        top_k_R: int32; 0 means all.
        top_p_R: float32 in (0, 1].
        min_p_R: float32 in [0, 1).

    Returns:
        float32 (rows,); -inf where nothing is restricted. Equals of the smallest logit kept are kept as well.
    """
    rows, vocabulary = logits_RV.shape
    thresholds = torch.empty((rows,), dtype=torch.float32, device=logits_RV.device)
    if rows:
        _sampling_thresholds_kernel[(rows,)](
            logits_RV, logits_RV.stride(0), temperature_R, top_k_R, top_p_R, min_p_R, thresholds,
            VOCABULARY=vocabulary, BLOCK=min(_BLOCK, max(256, triton.next_power_of_2(vocabulary))), num_warps=8,
        )  # fmt: skip
    return thresholds
