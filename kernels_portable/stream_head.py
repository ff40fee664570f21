"""Hyper-connections, head: the streams after the last layer become one hidden state. T tokens, N streams, D lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.stream_mix import mix_streams, mixing_logits, mixing_scale

__all__ = ["collapse_streams"]

_LANES = 512  # hidden lanes of a program


@triton.jit(do_not_specialize=["num_tokens"])
def _collapse_streams_kernel(
    streams_ptr, logits_ptr, squares_ptr, base_ptr, scale_ptr, x_ptr, num_tokens, norm_eps, hc_eps,
    SPLITS: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    place = token * (N * HIDDEN) + stream[:, None] * HIDDEN + lanes[None, :]
    old = tl.load(streams_ptr + place, mask=(lanes < HIDDEN)[None, :], other=0.0)
    scale = mixing_scale(squares_ptr, token, num_tokens, norm_eps, N * HIDDEN, SPLITS)
    logits = mixing_logits(logits_ptr, scale, token, num_tokens, 0, N, N, SPLITS)
    pre = tl.sigmoid(logits * tl.load(scale_ptr) + tl.load(base_ptr + stream)) + hc_eps
    x = tl.sum(pre[:, None] * old.to(tl.float32), axis=0)
    tl.store(x_ptr + token * HIDDEN + lanes, x.to(x_ptr.dtype.element_ty), mask=lanes < HIDDEN)


def collapse_streams(
    streams_TND: Tensor,
    fn_NC: Tensor,
    base_N: Tensor,
    scale_1: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_splits: int,
) -> Tensor:
    """Collapses the streams.

    Args:
        streams_TND: (tokens, streams, hidden) bfloat16 or float32.
        fn_NC: Contiguous float32 (streams, streams * hidden).
        base_N: float32 offsets.
        scale_1: (1,) float32 gain.
        norm_eps: Added to the mean square.
        hc_eps: Added to each coefficient.
        num_splits: From `num_mix_splits`.

    Returns:
        (tokens, hidden) in the type of the streams.
    """
    num_tokens, n, hidden = streams_TND.shape
    streams_TND = streams_TND.contiguous()
    x = torch.empty((num_tokens, hidden), dtype=streams_TND.dtype, device=streams_TND.device)
    if num_tokens:
        parts = mix_streams(streams_TND, fn_NC, num_splits=num_splits)
        lanes = min(_LANES, triton.next_power_of_2(hidden))
        _collapse_streams_kernel[(num_tokens, triton.cdiv(hidden, lanes))](
            streams_TND, parts.logits_STM, parts.squares_ST, base_N, scale_1, x, num_tokens, norm_eps, hc_eps,
            SPLITS=num_splits, N=n, HIDDEN=hidden, LANES=lanes, num_warps=4,
        )  # fmt: skip
    return x
