"""Hyper-connections by aiter. Shapes as in `halocline.hal.ops.hyper_connection`.

Written after the recorded calls; never run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_hip.library_calls import library_function
from halocline.backends_triton.hyper_connection_triton import check_write
from halocline.hal.formats import check_shape
from halocline.hal.op import implements
from halocline.hal.ops.hyper_connection import StreamRead, read, write

__all__ = ["read_aiter", "write_aiter"]

_mhc_pre = library_function("mhc_pre")
_mhc_post = library_function("mhc_post")
_POST_GAIN = 2.0  # the library's default is 1


@implements(read)
def read_aiter(
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
    num_tokens, n, hidden = streams_TND.shape
    check_shape("the mixing matrix", fn_MC, ((2 + n) * n, n * hidden))
    if not num_tokens:
        floats = torch.empty((0, n, n), dtype=torch.float32, device=streams_TND.device)
        return StreamRead(streams_TND.new_empty((0, hidden)), floats[..., 0], floats)
    post_TN1, comb_TNN, x_TD = _mhc_pre(
        residual=streams_TND.contiguous(),
        fn=fn_MC,
        hc_scale=scale_3,
        hc_base=base_M,
        rms_eps=norm_eps,
        hc_pre_eps=hc_eps,
        hc_sinkhorn_eps=hc_eps,
        hc_post_mult_value=_POST_GAIN,
        sinkhorn_repeat=sinkhorn_iterations,
    )
    return StreamRead(x_TD, post_TN1.view(num_tokens, n), comb_TNN)


@implements(write)
def write_aiter(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """See the contract."""
    check_write(y_TD, streams_TND, post_TN, comb_TNN)
    streams_TND = streams_TND.contiguous()
    out_TND = torch.empty_like(streams_TND)
    if y_TD.shape[0]:
        _mhc_post(
            out=out_TND,
            x=y_TD.contiguous(),
            residual=streams_TND,
            post_layer_mix=post_TN.contiguous()[..., None],
            comb_res_mix=comb_TNN.contiguous(),
        )
    return out_TND
