"""Hyper-connections by the portable tilelang kernels. Shapes as in `halocline.hal.ops.hyper_connection`."""

from __future__ import annotations

from torch import Tensor

from halocline.backends_triton.hyper_connection_triton import check_write
from halocline.hal.formats import check_shape
from halocline.hal.op import implements
from halocline.hal.ops.hyper_connection import StreamRead, read, write
from halocline.kernels_portable.target import target_of
from halocline.kernels_portable.tilelang_streams import read_streams_tilelang, write_streams_tilelang

__all__ = ["read_tilelang", "write_tilelang"]


@implements(read)
def read_tilelang(
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
        *read_streams_tilelang(
            streams_TND,
            fn_MC,
            base_M,
            scale_3,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            sinkhorn_iterations=sinkhorn_iterations,
            target=target_of(streams_TND.device),
        )
    )


@implements(write)
def write_tilelang(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """See the contract."""
    check_write(y_TD, streams_TND, post_TN, comb_TNN)
    return write_streams_tilelang(y_TD, streams_TND, post_TN, comb_TNN, target=target_of(streams_TND.device))
