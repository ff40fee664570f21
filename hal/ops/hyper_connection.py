"""Contracts of the manifold-constrained hyper-connections (mHC): several residual streams instead of one.

Shapes: T tokens, N streams, D hidden lanes, M = (2 + N) * N mixing logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StreamRead", "head", "read", "write"]

_TOLERANCES = {
    "float32": Tolerance(atol=2e-5, rtol=1e-5, norm=1e-5, reason="float32 sums of N * D products in another order"),
    "bfloat16": Tolerance(atol=2e-2, rtol=2e-2, norm=4e-3, reason="one bfloat16 rounding; TF32 mixing logits: 3e-4"),
}


class StreamRead(NamedTuple):
    """What a site reads from the streams and needs again to write to them.

    Attributes:
        x_TD: Input of the site, element type of the streams.
        post_TN: float32 gain with which the site's output enters each stream.
        comb_TNN: float32 mixing of old streams (first index) into new ones (second index).
    """

    x_TD: Tensor
    post_TN: Tensor
    comb_TNN: Tensor


@op("hyper_connection", tolerances=_TOLERANCES, batch_invariant=False)
def read(
    streams_TND: Tensor,
    fn_MC: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
) -> StreamRead:
    """Mixes the streams into a site's input and computes how its output will be written back.

    Args:
        streams_TND: (tokens, streams, hidden) residual streams, bfloat16 or float32.
        fn_MC: ((2 + N) * N, N * D) float32 mixing matrix; rows are pre (N), post (N), comb (N * N, old-major).
        base_M: ((2 + N) * N,) float32 offsets.
        scale_3: (3,) float32 gains of pre, post and comb.
        norm_eps: Added to the mean square of the flattened streams.
        hc_eps: Added to pre, to comb and to each Sinkhorn divisor.
        sinkhorn_iterations: Number of column normalisations; there is one row normalisation less.

    Returns:
        The site's input and the coefficients that `write` takes. post has no epsilon and lies in (0, 2).

    Raises:
        ShapeError: If the matrix does not fit the streams.
    Numerics: float32 throughout; x is cast once at the end.
    Source: DeepSeek-V4 report, hyper-connections; softmax over k, then columns first and last.
    """
    raise NotImplementedError


@op("hyper_connection", tolerances=_TOLERANCES)
def write(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """Writes a site's output into the streams: new_k = post_k * y + sum_j comb[j, k] * old_j.

    Args:
        y_TD: (tokens, hidden) output of the site.
        streams_TND: (tokens, streams, hidden) streams that `read` saw.
        post_TN: (tokens, streams) float32.
        comb_TNN: (tokens, streams, streams) float32, first index over old streams.

    Returns:
        New streams, shape and element type of `streams_TND`.

    Raises:
        ShapeError: If the shapes do not fit each other.
    Numerics: float32, cast once.
    Source: DeepSeek-V4 report; the mixing matrix is not symmetric, so the first index matters.
    """
    raise NotImplementedError


@op("hyper_connection", tolerances=_TOLERANCES, batch_invariant=False)
def head(
    streams_TND: Tensor, fn_NC: Tensor, base_N: Tensor, scale_1: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """Collapses the streams after the last layer into one hidden state for each token.

    Args:
        streams_TND: (tokens, streams, hidden).
        fn_NC: (N, N * D) float32.
        base_N: (N,) float32.
        scale_1: (1,) float32.
        norm_eps: Added to the mean square of the flattened streams.
        hc_eps: Added to each gain.

    Returns:
        (tokens, hidden), element type of the streams.

    Raises:
        ShapeError: If the matrix does not fit the streams.
    Numerics: float32, cast once.
    Source: DeepSeek-V4 report; no Sinkhorn here.
    """
    raise NotImplementedError
