"""Reference hyper-connections. Shapes as in `halocline.hal.ops.hyper_connection`."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_reference.norm import root_mean_square_scale
from halocline.hal.formats import check_shape
from halocline.hal.op import implements
from halocline.hal.ops.hyper_connection import StreamRead, head, read, write

__all__ = ["head_reference", "read_reference", "write_reference"]


def _mixing_logits(streams_TND: Tensor, fn_MC: Tensor, norm_eps: float) -> Tensor:
    u_TC = streams_TND.flatten(1).float()
    return (u_TC @ fn_MC.float().T) * root_mean_square_scale(u_TC, norm_eps)


def _sinkhorn(comb_TNN: Tensor, hc_eps: float, iterations: int) -> Tensor:
    """Divides by column sums first and last, by row sums in between; the first index runs over old streams."""
    comb_TNN = comb_TNN / (comb_TNN.sum(1, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb_TNN = comb_TNN / (comb_TNN.sum(2, keepdim=True) + hc_eps)
        comb_TNN = comb_TNN / (comb_TNN.sum(1, keepdim=True) + hc_eps)
    return comb_TNN


@implements(read)
def read_reference(
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
    m_TM = _mixing_logits(streams_TND, fn_MC, norm_eps)
    pre_TN = torch.sigmoid(m_TM[:, :n] * scale_3[0] + base_M[:n]) + hc_eps
    post_TN = 2 * torch.sigmoid(m_TM[:, n : 2 * n] * scale_3[1] + base_M[n : 2 * n])
    logits_TNN = (m_TM[:, 2 * n :] * scale_3[2] + base_M[2 * n :]).view(num_tokens, n, n)
    comb_TNN = _sinkhorn(torch.softmax(logits_TNN, dim=-1) + hc_eps, hc_eps, sinkhorn_iterations)
    x_TD = torch.einsum("tn,tnd->td", pre_TN, streams_TND.float())
    return StreamRead(x_TD.to(streams_TND.dtype), post_TN, comb_TNN)


@implements(write)
def write_reference(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """See the contract."""
    num_tokens, n, hidden = streams_TND.shape
    check_shape("the site's output", y_TD, (num_tokens, hidden))
    check_shape("post", post_TN, (num_tokens, n))
    check_shape("comb", comb_TNN, (num_tokens, n, n))
    mixed_TND = torch.einsum("tjk,tjd->tkd", comb_TNN, streams_TND.float())
    return (post_TN[:, :, None] * y_TD.float()[:, None, :] + mixed_TND).to(streams_TND.dtype)


@implements(head)
def head_reference(
    streams_TND: Tensor, fn_NC: Tensor, base_N: Tensor, scale_1: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """See the contract."""
    _, n, hidden = streams_TND.shape
    check_shape("the collapsing matrix", fn_NC, (n, n * hidden))
    pre_TN = torch.sigmoid(_mixing_logits(streams_TND, fn_NC, norm_eps) * scale_1 + base_N) + hc_eps
    return torch.einsum("tn,tnd->td", pre_TN, streams_TND.float()).to(streams_TND.dtype)
