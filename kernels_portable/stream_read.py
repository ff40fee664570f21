"""Hyper-connections, read: coefficients from mixing logits, Sinkhorn rounds, and the site's input.

T tokens, N streams (a power of two), D hidden lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.stream_mix import logit_parts, mix_streams, scale_of_parts, square_parts

__all__ = ["read_streams"]

_LANES = 512  # hidden lanes of a program


@triton.jit
def _sinkhorn(comb, eps, ROUNDS: tl.constexpr):
    """Divides by column sums first and last, by row sums in between; the first index runs over old streams."""
    comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    for _ in range(ROUNDS - 1):
        comb = comb / (tl.sum(comb, axis=1)[:, None] + eps)
        comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    return comb


@triton.jit(do_not_specialize=["num_tokens"])
def _read_streams_kernel(
    streams_ptr, logits_ptr, squares_ptr, base_ptr, scale_ptr, x_ptr, post_ptr, comb_ptr, num_tokens, norm_eps, hc_eps,
    ROUNDS: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The last two programs of a token compute what is written back, the others parts of the site's input.

    Each asks for all that it reads before it waits for any of it. The Sinkhorn rounds take longest and wait for nobody.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ROWS: tl.constexpr = (2 + N) * N
    stream = tl.arange(0, N)
    squares = square_parts(squares_ptr, token, num_tokens, SPLITS)
    if part < PARTS:
        lanes = part * LANES + tl.arange(0, LANES)
        old = tl.load(
            streams_ptr + token * (N * HIDDEN) + stream[:, None] * HIDDEN + lanes[None, :],
            mask=(lanes < HIDDEN)[None, :], other=0.0,
        )  # fmt: skip
        pre = logit_parts(logits_ptr, token, num_tokens, 0, N, ROWS, SPLITS)
        pre_gain = tl.load(scale_ptr)
        pre_base = tl.load(base_ptr + stream)
        scale = scale_of_parts(squares, norm_eps, N * HIDDEN)
        pre = tl.sigmoid(tl.sum(pre, axis=0) * scale * pre_gain + pre_base) + hc_eps
        x = tl.sum(pre[:, None] * old.to(tl.float32), axis=0)
        tl.store(x_ptr + token * HIDDEN + lanes, x.to(x_ptr.dtype.element_ty), mask=lanes < HIDDEN)
    elif part == PARTS:
        post = logit_parts(logits_ptr, token, num_tokens, N, N, ROWS, SPLITS)
        post_gain = tl.load(scale_ptr + 1)
        post_base = tl.load(base_ptr + N + stream)
        scale = scale_of_parts(squares, norm_eps, N * HIDDEN)
        post = 2 * tl.sigmoid(tl.sum(post, axis=0) * scale * post_gain + post_base)
        tl.store(post_ptr + token * N + stream, post)
    else:
        cell = stream[:, None] * N + stream[None, :]
        comb = logit_parts(logits_ptr, token, num_tokens, 2 * N, N * N, ROWS, SPLITS)
        comb_gain = tl.load(scale_ptr + 2)
        comb_base = tl.load(base_ptr + 2 * N + cell)
        scale = scale_of_parts(squares, norm_eps, N * HIDDEN)
        comb = tl.reshape(tl.sum(comb, axis=0) * scale, (N, N)) * comb_gain + comb_base
        comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
        comb = comb / tl.sum(comb, axis=1)[:, None] + hc_eps
        tl.store(comb_ptr + token * (N * N) + cell, _sinkhorn(comb, hc_eps, ROUNDS))


def read_streams(
    streams_TND: Tensor,
    fn_MC: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
    num_splits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes the streams into a site's input and computes how its output will be written back.

    Args:
        streams_TND: (tokens, streams, hidden) bfloat16 or float32.
        fn_MC: Contiguous float32 ((2 + streams) * streams, streams * hidden): rows of pre, post and comb.
        base_M: float32 offsets.
        scale_3: float32 gains of pre, post and comb.
        norm_eps: Added to the mean square.
        hc_eps: Added to pre, to comb and to each Sinkhorn divisor.
        sinkhorn_iterations: Column normalisations; there is one row normalisation less.
        num_splits: From `num_mix_splits`.

    Returns:
        Input (tokens, hidden) in the type of the streams, float32 post (tokens, streams), float32 comb (tokens,
        streams, streams) whose first index runs over old streams.
    """
    num_tokens, n, hidden = streams_TND.shape
    if n & (n - 1):
        raise ValueError(f"{n} residual streams: a power of two is needed")
    streams_TND = streams_TND.contiguous()
    x = torch.empty((num_tokens, hidden), dtype=streams_TND.dtype, device=streams_TND.device)
    post = torch.empty((num_tokens, n), dtype=torch.float32, device=streams_TND.device)
    comb = torch.empty((num_tokens, n, n), dtype=torch.float32, device=streams_TND.device)
    if num_tokens:
        parts = mix_streams(streams_TND, fn_MC, num_splits=num_splits)
        lanes = min(_LANES, triton.next_power_of_2(hidden))
        num_parts = triton.cdiv(hidden, lanes)
        _read_streams_kernel[(num_tokens, num_parts + 2)](
            streams_TND, parts.logits_STM, parts.squares_ST, base_M, scale_3, x, post, comb, num_tokens, norm_eps,
            hc_eps, ROUNDS=sinkhorn_iterations, SPLITS=num_splits, N=n, HIDDEN=hidden,
            PARTS=num_parts, LANES=lanes, num_warps=4,
        )  # fmt: skip
    return x, post, comb
