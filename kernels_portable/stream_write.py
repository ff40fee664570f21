"""Hyper-connections, write: new_k = post_k * y + sum over j of comb[j, k] * old_j. T tokens, N streams, D lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_streams"]

_LANES = 512  # hidden lanes of a program


@triton.jit
def _write_streams_kernel(
    y_ptr, streams_ptr, post_ptr, comb_ptr, out_ptr, N: tl.constexpr, HIDDEN: tl.constexpr, LANES: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < HIDDEN
    stream = tl.arange(0, N)
    y = tl.load(y_ptr + token * HIDDEN + lanes, mask=inside, other=0.0).to(tl.float32)
    place = token * (N * HIDDEN) + stream[:, None] * HIDDEN + lanes[None, :]
    old = tl.load(streams_ptr + place, mask=inside[None, :], other=0.0).to(tl.float32)
    comb = tl.load(comb_ptr + token * (N * N) + stream[:, None] * N + stream[None, :])
    post = tl.load(post_ptr + token * N + stream)
    mixed = tl.sum(comb[:, :, None] * old[:, None, :], axis=0)
    new = post[:, None] * y[None, :] + mixed
    tl.store(out_ptr + place, new.to(out_ptr.dtype.element_ty), mask=inside[None, :])


def write_streams(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """Writes a site's output into the streams.

    Args:
        y_TD: (tokens, hidden) output of the site.
        streams_TND: (tokens, streams, hidden) that `read_streams` saw.
        post_TN: Contiguous float32 (tokens, streams).
        comb_TNN: Contiguous float32 (tokens, streams, streams), first index over old streams.

    Returns:
        New streams, shape and type of `streams_TND`.
    """
    num_tokens, n, hidden = streams_TND.shape
    streams_TND = streams_TND.contiguous()
    out = torch.empty_like(streams_TND)
    if num_tokens:
        lanes = min(_LANES, triton.next_power_of_2(hidden))
        _write_streams_kernel[(num_tokens, triton.cdiv(hidden, lanes))](
            y_TD.contiguous(), streams_TND, post_TN, comb_TNN, out, N=n, HIDDEN=hidden, LANES=lanes, num_warps=4
        )
    return out
