"""Mixing logits of hyper-connections: rows of a float32 matrix times the flattened streams, and their square sum.

T tokens, C = streams * hidden lanes, M rows of the matrix, S splits of C. Parts of C go to different programs, because
the matrix is long and thin; what reads the logits sums the parts. Products are of float32 quality: the matrix is split
into three bfloat16 numbers where the streams are bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.number_codes import split_float32
from halocline.kernels_portable.target import Target

__all__ = [
    "MANY_SPLITS", "MixParts", "logit_parts", "mix_streams", "mixing_logits", "mixing_scale", "num_mix_splits",
    "scale_of_parts", "square_parts",
]  # fmt: skip

_TOKENS = 16  # tokens of a program
_LANES = {torch.bfloat16: 128, torch.float32: 64}  # lanes of a step
_FEW_SPLITS, MANY_SPLITS = 32, 128


class MixParts(NamedTuple):
    """Parts of the mixing logits, float32 (S, T, M), and of the square sums, float32 (S, T)."""

    logits_STM: Tensor
    squares_ST: Tensor


def num_mix_splits(
    target: Target, *, num_tokens: int, lanes: int, batch_invariant: bool, most: int = _FEW_SPLITS
) -> int:
    """Parts into which C is divided: a power of two; one size for all token counts if that is asked.

    Few sizes serve all token counts, because each is another kernel. What sums the parts as one tile takes up to
    `MANY_SPLITS`, what adds one after the other fewer.
    """
    most = min(most, int(triton.next_power_of_2(triton.cdiv(lanes, _LANES[torch.bfloat16]))))
    if batch_invariant:
        return min(most, 8)
    wanted = 2 * target.num_processors // max(1, -(-num_tokens // _TOKENS))
    splits = most
    while splits > max(wanted, 1):
        splits = max(splits // 4, 1)
    return splits


@triton.jit
def square_parts(squares_ptr, token, num_tokens, SPLITS: tl.constexpr):
    """Parts (SPLITS,) of the square sum of one token."""
    return tl.load(squares_ptr + tl.arange(0, SPLITS) * num_tokens + token)


@triton.jit
def scale_of_parts(squares, eps, LANES: tl.constexpr):
    """One over the root mean square of the streams of one token."""
    return tl.rsqrt(tl.sum(squares, axis=0) / LANES + eps)


@triton.jit
def logit_parts(
    logits_ptr, token, num_tokens, FIRST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):
    """Parts (SPLITS, COLUMNS) of the unscaled logits of one token, from row FIRST of the matrix on."""
    splits = tl.arange(0, SPLITS)[:, None]
    columns = FIRST + tl.arange(0, COLUMNS)[None, :]
    return tl.load(logits_ptr + (splits * num_tokens + token) * ROWS + columns)


@triton.jit
def mixing_scale(squares_ptr, token, num_tokens, eps, LANES: tl.constexpr, SPLITS: tl.constexpr):
    """One over the root mean square of the streams of one token."""
    return scale_of_parts(square_parts(squares_ptr, token, num_tokens, SPLITS), eps, LANES)


@triton.jit
def mixing_logits(
    logits_ptr, scale, token, num_tokens, FIRST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Logits (COLUMNS,) of one token from row FIRST of the matrix on: summed over the parts, then scaled."""
    return tl.sum(logit_parts(logits_ptr, token, num_tokens, FIRST, COLUMNS, ROWS, SPLITS), axis=0) * scale


@triton.jit(do_not_specialize=["num_tokens"])
def _mix_streams_kernel(
    streams_ptr, fn_ptr, logits_ptr, squares_ptr, num_tokens, SHARE: tl.constexpr, ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    rows = tl.arange(0, ROW_BLOCK)
    present = tokens < num_tokens
    logits = tl.zeros((TOKENS, ROW_BLOCK), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(split * SHARE, min((split + 1) * SHARE, WIDTH), LANES):
        lanes = start + tl.arange(0, LANES)
        inside = lanes < WIDTH
        place = tokens.to(tl.int64)[:, None] * WIDTH + lanes[None, :]
        u = tl.load(streams_ptr + place, mask=present[:, None] & inside[None, :], other=0.0)
        matrix = tl.load(
            fn_ptr + rows[None, :] * WIDTH + lanes[:, None], mask=(rows < ROWS)[None, :] & inside[:, None], other=0.0
        )
        wide = u.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        if u.dtype == tl.bfloat16:
            high, middle, low = split_float32(matrix)
            logits = tl.dot(u, low, logits)
            logits = tl.dot(u, middle, logits)
            logits = tl.dot(u, high, logits)
        else:
            logits = tl.dot(u, matrix, logits, input_precision="bf16x6")
    out = (split * num_tokens + tokens).to(tl.int64)
    tl.store(logits_ptr + out[:, None] * ROWS + rows[None, :], logits, mask=present[:, None] & (rows < ROWS)[None, :])
    tl.store(squares_ptr + out, squares, mask=present)


def mix_streams(streams_TND: Tensor, fn_MC: Tensor, *, num_splits: int) -> MixParts:
    """Multiplies the flattened streams of each token by the rows of a matrix.

    Args:
        streams_TND: Contiguous (tokens, streams, hidden) bfloat16 or float32.
        fn_MC: Contiguous float32 (rows, streams * hidden).
        num_splits: From `num_mix_splits`.

    Returns:
        Parts that `stream_read` and `stream_head` sum.
    """
    num_tokens, (rows, width) = streams_TND.shape[0], fn_MC.shape
    logits = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=streams_TND.device)
    squares = torch.empty((num_splits, num_tokens), dtype=torch.float32, device=streams_TND.device)
    lanes = _LANES[streams_TND.dtype]
    share = triton.cdiv(triton.cdiv(width, num_splits), lanes) * lanes
    if num_tokens:
        _mix_streams_kernel[(triton.cdiv(num_tokens, _TOKENS), num_splits)](
            streams_TND, fn_MC, logits, squares, num_tokens, SHARE=share, ROWS=rows,
            ROW_BLOCK=max(16, triton.next_power_of_2(rows)), WIDTH=width, TOKENS=_TOKENS, LANES=lanes, num_warps=4,
            num_stages=3,
        )  # fmt: skip
    return MixParts(logits, squares)
