"""Draws by Gumbel noise from a counter-based generator, part by part of the vocabulary. R rows, V ids, C parts.

What names a draw, and nothing else does: Philox 4x32-10 with the seed as key and the counter (id // 4, low word of the
count, high word of the count, 0); word id % 4 belongs to the id. A word x becomes u = min((x + 0.5) * 2 ** -32,
1 - 2 ** -24) and the noise -log(-log1p(-u)).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["DrawParts", "draw_parts"]

_BLOCK = 1024
_PART = 8192  # ids of a program


class DrawParts(NamedTuple):
    """For each row and part: the best value, its id, and the largest logit (NaN if one is NaN)."""

    values_RC: Tensor
    ids_RC: Tensor
    largest_RC: Tensor


@triton.jit
def _gumbel_noise(first, seed, count, BLOCK: tl.constexpr):
    """float32 noise of ids [first, first + BLOCK), `first` being a multiple of 4."""
    group = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = group * 0
    low, high = zero + (count & 0xFFFFFFFF).to(tl.uint32), zero + ((count >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key_0, key_1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word_0, word_1, word_2, word_3 = tl.philox_impl(group, low, high, zero, key_0, key_1)
    words = tl.reshape(tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3)), (BLOCK,))
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # -log1p(-u): log loses the last bits of a small u; dividing by what the difference really took restores them.
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def _draw_parts_kernel(
    logits_ptr, logits_stride, temperature_ptr, thresholds_ptr, seeds_ptr, counts_ptr, values_ptr, ids_ptr, largest_ptr,
    VOCABULARY: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    lowest = tl.load(thresholds_ptr + row)
    seed = tl.load(seeds_ptr + row)
    count = tl.load(counts_ptr + row)
    best = float("-inf")
    best_id = part * PART
    largest = float("-inf")
    num_nan = 0
    for start in range(part * PART, min((part + 1) * PART, VOCABULARY), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < VOCABULARY
        x = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=float("-inf"))
        num_nan += tl.sum((x != x).to(tl.int32), axis=0)  # noqa: PLR0124 (true for NaN alone)
        largest = tl.maximum(largest, tl.max(x, axis=0))
        value = x
        if temperature > 0:
            x = tl.div_rn(x, temperature)
            value = tl.where(x >= lowest, x + _gumbel_noise(start, seed, count, BLOCK), float("-inf"))
        block_best = tl.max(value, axis=0)
        block_id = tl.min(tl.where(value == block_best, ids, VOCABULARY), axis=0)
        best_id = tl.where(block_best > best, block_id, best_id)
        best = tl.maximum(best, block_best)
    place = row * tl.num_programs(1) + part
    tl.store(values_ptr + place, best)
    tl.store(ids_ptr + place, best_id)
    tl.store(largest_ptr + place, tl.where(num_nan > 0, float("nan"), largest))


def draw_parts(
    logits_RV: Tensor, temperature_R: Tensor, thresholds_R: Tensor, seeds_R: Tensor, counters_R: Tensor
) -> DrawParts:
    """Finds the best id of each part of the vocabulary.

    Args:
        logits_RV: float32, ids contiguous.
        temperature_R: float32; 0 takes the largest logit without noise.
        thresholds_R: float32, from `sampling_thresholds`.
        seeds_R: int64 seeds.
        counters_R: int64 tokens generated before.

    Returns:
        Parts that `pick_tokens` joins.
    """
    rows, vocabulary = logits_RV.shape
    parts, device = triton.cdiv(vocabulary, _PART), logits_RV.device
    values = torch.empty((rows, parts), dtype=torch.float32, device=device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=device)
    largest = torch.empty((rows, parts), dtype=torch.float32, device=device)
    if rows:
        _draw_parts_kernel[(rows, parts)](
            logits_RV, logits_RV.stride(0), temperature_R, thresholds_R, seeds_R, counters_R, values, ids, largest,
            VOCABULARY=vocabulary, PART=_PART, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return DrawParts(values, ids, largest)
