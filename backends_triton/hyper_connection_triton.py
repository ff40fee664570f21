"""Hyper-connections by the portable kernels. Shapes as in `halocline.hal.ops.hyper_connection`."""

from __future__ import annotations

from torch import Tensor

from halocline.hal.formats import check_shape
from halocline.hal.op import implements
from halocline.hal.ops.hyper_connection import StreamRead, head, read, write
from halocline.kernels_portable.stream_head import collapse_streams
from halocline.kernels_portable.stream_mix import MANY_SPLITS, num_mix_splits
from halocline.kernels_portable.stream_read import read_streams
from halocline.kernels_portable.stream_write import write_streams
from halocline.kernels_portable.target import target_of

__all__ = ["check_write", "head_triton", "read_triton", "write_triton"]


def _num_splits(streams_TND: Tensor, lanes: int) -> int:
    target = target_of(streams_TND.device)
    return num_mix_splits(target, num_tokens=streams_TND.shape[0], lanes=lanes, batch_invariant=False, most=MANY_SPLITS)


@implements(read)
def read_triton(
    streams_TND: Tensor,
    fn_MC: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
) -> StreamRead:
    """See the contract."""
    _, n, hidden = streams_TND.shape
    check_shape("the mixing matrix", fn_MC, ((2 + n) * n, n * hidden))
    return StreamRead(
        *read_streams(
            streams_TND,
            fn_MC,
            base_M,
            scale_3,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            sinkhorn_iterations=sinkhorn_iterations,
            num_splits=_num_splits(streams_TND, n * hidden),
        )
    )


def check_write(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> None:
    """Checks that what is written fits the streams.

    Raises:
        ShapeError: If it does not.
    """
    num_tokens, n, hidden = streams_TND.shape
    check_shape("the site's output", y_TD, (num_tokens, hidden))
    check_shape("post", post_TN, (num_tokens, n))
    check_shape("comb", comb_TNN, (num_tokens, n, n))


@implements(write)
def write_triton(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """See the contract."""
    check_write(y_TD, streams_TND, post_TN, comb_TNN)
    return write_streams(y_TD, streams_TND, post_TN.contiguous(), comb_TNN.contiguous())


@implements(head)
def head_triton(
    streams_TND: Tensor, fn_NC: Tensor, base_N: Tensor, scale_1: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """See the contract."""
    _, n, hidden = streams_TND.shape
    check_shape("the collapsing matrix", fn_NC, (n, n * hidden))
    return collapse_streams(
        streams_TND,
        fn_NC,
        base_N,
        scale_1,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        num_splits=_num_splits(streams_TND, n * hidden),
    )
