"""Hyper-connections in tilelang: mixing logits, coefficients, the site's input, and the write back.

T tokens, N streams, D hidden lanes, C = N * D, M = (2 + N) * N rows of the mixing matrix, S splits of C.

A known kernel of this kind split its threads at 32 and was wrong by sqrt(2) where a wave has 64 lanes. Here nothing
depends on the wave: products are the compiler's, and the Sinkhorn rounds of a token run in one thread.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T  # noqa: N812 (its own idiom)
import torch
from torch import Tensor

from halocline.kernels_portable.stream_mix import num_mix_splits
from halocline.kernels_portable.target import Target
from halocline.kernels_portable.tilelang_program import compiled, jit_program, num_threads

__all__ = [
    "coefficients_program",
    "mix_program",
    "read_streams_tilelang",
    "site_input_program",
    "write_program",
    "write_streams_tilelang",
]

_TOKENS = 16  # tokens of a mixing program
_LANES = 128  # lanes of a step


def mix_program(rows: int, lanes: int, splits: int, threads: int) -> Any:
    """Parts of the mixing logits and of the square sums; the float32 matrix is split into three bfloat16 numbers."""
    tokens = T.dynamic("tokens")
    block = -(-rows // 16) * 16
    steps = -(-lanes // (_LANES * splits))

    @jit_program(
        streams=T.Tensor((tokens, lanes), "bfloat16"),
        matrix=T.Tensor((rows, lanes), "float32"),
        logits=T.Tensor((splits, tokens, rows), "float32"),
        squares=T.Tensor((splits, tokens), "float32"),
    )
    def mix_streams(streams, matrix, logits, squares):
        with T.Kernel(T.ceildiv(tokens, _TOKENS), splits, threads=threads) as (token_block, split):
            streams_s = T.alloc_shared((_TOKENS, _LANES), "bfloat16")
            high_s = T.alloc_shared((block, _LANES), "bfloat16")
            middle_s = T.alloc_shared((block, _LANES), "bfloat16")
            low_s = T.alloc_shared((block, _LANES), "bfloat16")
            wide = T.alloc_fragment((_TOKENS, _LANES), "float32")
            total = T.alloc_fragment((_TOKENS, block), "float32")
            square = T.alloc_fragment((_TOKENS,), "float32")
            T.clear(total)
            T.clear(square)
            first = token_block * _TOKENS
            for step in T.serial(steps):
                start = (split * steps + step) * _LANES
                for t, c in T.Parallel(_TOKENS, _LANES):
                    inside = T.And(first + t < tokens, start + c < lanes)
                    streams_s[t, c] = T.if_then_else(inside, streams[first + t, start + c], T.bfloat16(0))
                for r, c in T.Parallel(block, _LANES):
                    value = T.if_then_else(T.And(r < rows, start + c < lanes), matrix[r, start + c], 0.0)
                    high = T.Cast("bfloat16", value)
                    rest = value - T.Cast("float32", high)
                    middle = T.Cast("bfloat16", rest)
                    high_s[r, c] = high
                    middle_s[r, c] = middle
                    low_s[r, c] = T.Cast("bfloat16", rest - T.Cast("float32", middle))
                for t, c in T.Parallel(_TOKENS, _LANES):
                    wide[t, c] = T.Cast("float32", streams_s[t, c]) * T.Cast("float32", streams_s[t, c])
                T.reduce_sum(wide, square, dim=1, clear=False)
                T.gemm(streams_s, low_s, total, transpose_B=True)
                T.gemm(streams_s, middle_s, total, transpose_B=True)
                T.gemm(streams_s, high_s, total, transpose_B=True)
            for t, r in T.Parallel(_TOKENS, block):
                if first + t < tokens and r < rows:
                    logits[split, first + t, r] = total[t, r]
            for t in T.Parallel(_TOKENS):
                if first + t < tokens:
                    squares[split, first + t] = square[t]

    return mix_streams


def coefficients_program(  # size: the three kinds of coefficients of a token
    n: int, lanes: int, splits: int, rounds: int, norm_eps: float, hc_eps: float, threads: int
) -> Any:
    """Coefficients of each token from the parts of its logits, all of a token in one thread."""
    tokens = T.dynamic("tokens")
    rows = (2 + n) * n

    @jit_program(
        logits=T.Tensor((splits, tokens, rows), "float32"),
        squares=T.Tensor((splits, tokens), "float32"),
        base=T.Tensor((rows,), "float32"),
        gain=T.Tensor((3,), "float32"),
        pre=T.Tensor((tokens, n), "float32"),
        post=T.Tensor((tokens, n), "float32"),
        comb=T.Tensor((tokens, n, n), "float32"),
    )
    def stream_coefficients(  # noqa: PLR0912 # size: one token in one thread
        logits, squares, base, gain, pre, post, comb
    ):
        with T.Kernel(T.ceildiv(tokens, threads), threads=threads) as block:
            token = block * threads + T.get_thread_binding()
            mixed = T.alloc_local((rows,), "float32")
            cells = T.alloc_local((n, n), "float32")
            held = T.alloc_local((1,), "float32")
            if token < tokens:
                held[0] = 0.0
                for s in T.serial(splits):
                    held[0] += squares[s, token]
                inverse = T.rsqrt(held[0] / lanes + norm_eps)
                for r in T.serial(rows):
                    mixed[r] = 0.0
                    for s in T.serial(splits):
                        mixed[r] += logits[s, token, r]
                    mixed[r] = mixed[r] * inverse
                for i in T.serial(n):
                    pre[token, i] = T.sigmoid(mixed[i] * gain[0] + base[i]) + hc_eps
                    post[token, i] = 2.0 * T.sigmoid(mixed[n + i] * gain[1] + base[n + i])
                for i in T.serial(n):
                    held[0] = -T.infinity("float32")
                    for k in T.serial(n):
                        cells[i, k] = mixed[2 * n + i * n + k] * gain[2] + base[2 * n + i * n + k]
                        held[0] = T.max(held[0], cells[i, k])
                    for k in T.serial(n):
                        cells[i, k] = T.exp(cells[i, k] - held[0])
                    held[0] = 0.0
                    for k in T.serial(n):
                        held[0] += cells[i, k]
                    for k in T.serial(n):
                        cells[i, k] = cells[i, k] / held[0] + hc_eps
                for turn in T.serial(rounds):
                    if turn > 0:
                        for i in T.serial(n):
                            held[0] = hc_eps
                            for k in T.serial(n):
                                held[0] += cells[i, k]
                            for k in T.serial(n):
                                cells[i, k] = cells[i, k] / held[0]
                    for k in T.serial(n):
                        held[0] = hc_eps
                        for i in T.serial(n):
                            held[0] += cells[i, k]
                        for i in T.serial(n):
                            cells[i, k] = cells[i, k] / held[0]
                for i in T.serial(n):
                    for k in T.serial(n):
                        comb[token, i, k] = cells[i, k]

    return stream_coefficients


def site_input_program(n: int, hidden: int, threads: int) -> Any:
    """The site's input: the streams, weighted by `pre`."""
    tokens, share = T.dynamic("tokens"), 8 * threads

    @jit_program(
        streams=T.Tensor((tokens, n, hidden), "bfloat16"),
        pre=T.Tensor((tokens, n), "float32"),
        x=T.Tensor((tokens, hidden), "bfloat16"),
    )
    def site_input(streams, pre, x):
        with T.Kernel(tokens, T.ceildiv(hidden, share), threads=threads) as (token, lane_block):
            total = T.alloc_fragment((share,), "float32")
            T.clear(total)
            for i in T.serial(n):
                for c in T.Parallel(share):
                    lane = lane_block * share + c
                    total[c] += T.if_then_else(
                        lane < hidden, pre[token, i] * T.Cast("float32", streams[token, i, lane]), 0.0
                    )
            for c in T.Parallel(share):
                if lane_block * share + c < hidden:
                    x[token, lane_block * share + c] = total[c]

    return site_input


def write_program(n: int, hidden: int, threads: int) -> Any:
    """New streams: post_k * y + sum over j of comb[j, k] * old_j."""
    tokens, share = T.dynamic("tokens"), 8 * threads

    @jit_program(
        y=T.Tensor((tokens, hidden), "bfloat16"),
        streams=T.Tensor((tokens, n, hidden), "bfloat16"),
        post=T.Tensor((tokens, n), "float32"),
        comb=T.Tensor((tokens, n, n), "float32"),
        out=T.Tensor((tokens, n, hidden), "bfloat16"),
    )
    def write_streams(y, streams, post, comb, out):
        with T.Kernel(tokens, T.ceildiv(hidden, share), threads=threads) as (token, lane_block):
            total = T.alloc_fragment((share,), "float32")
            for k in T.serial(n):
                for c in T.Parallel(share):
                    lane = lane_block * share + c
                    total[c] = T.if_then_else(lane < hidden, post[token, k] * T.Cast("float32", y[token, lane]), 0.0)
                for j in T.serial(n):
                    for c in T.Parallel(share):
                        lane = lane_block * share + c
                        total[c] += T.if_then_else(
                            lane < hidden, comb[token, j, k] * T.Cast("float32", streams[token, j, lane]), 0.0
                        )
                for c in T.Parallel(share):
                    if lane_block * share + c < hidden:
                        out[token, k, lane_block * share + c] = total[c]

    return write_streams


def read_streams_tilelang(
    streams_TND: Tensor,
    fn_MC: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes bfloat16 streams into a site's input; arguments and results as `stream_read.read_streams`."""
    num_tokens, n, hidden = streams_TND.shape
    device, lanes, rows = streams_TND.device, n * hidden, fn_MC.shape[0]
    x = torch.empty((num_tokens, hidden), dtype=streams_TND.dtype, device=device)
    pre, post = (torch.empty((num_tokens, n), dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty((num_tokens, n, n), dtype=torch.float32, device=device)
    if num_tokens:
        splits = num_mix_splits(target, num_tokens=num_tokens, lanes=lanes, batch_invariant=False)
        streams_TND = streams_TND.contiguous()
        logits = torch.empty((splits, num_tokens, rows), dtype=torch.float32, device=device)
        squares = torch.empty((splits, num_tokens), dtype=torch.float32, device=device)
        narrow, wide = num_threads(target.wave_size, 2 * target.wave_size), num_threads(target.wave_size)
        compiled(mix_program, rows, lanes, splits, narrow)(streams_TND.flatten(1), fn_MC, logits, squares)
        coefficients = compiled(
            coefficients_program, n, lanes, splits, sinkhorn_iterations, norm_eps, hc_eps, target.wave_size
        )
        coefficients(logits, squares, base_M, scale_3, pre, post, comb)
        compiled(site_input_program, n, hidden, wide)(streams_TND, pre, x)
    return x, post, comb


def write_streams_tilelang(
    y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor, *, target: Target
) -> Tensor:
    """Writes a site's output into bfloat16 streams; arguments and result as `stream_write.write_streams`."""
    num_tokens, n, hidden = streams_TND.shape
    streams_TND = streams_TND.contiguous()
    out = torch.empty_like(streams_TND)
    if num_tokens:
        kernel = compiled(write_program, n, hidden, num_threads(target.wave_size))
        kernel(y_TD.contiguous(), streams_TND, post_TN.contiguous(), comb_TNN.contiguous(), out)
    return out
