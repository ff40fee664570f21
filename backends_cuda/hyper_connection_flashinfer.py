"""Hyper-connections by FlashInfer, mixing logits by DeepGEMM. Shapes as in `halocline.hal.ops.hyper_connection`.

A read of few tokens is our own: the libraries' two kernels take 20 us for any number up to 128, ours 8 to 19 us.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halocline.backends_cuda.gemm_deep_gemm import deep_gemm
from halocline.backends_cuda.manifest import FLASHINFER
from halocline.backends_triton.hyper_connection_triton import check_write, read_triton
from halocline.hal.errors import ShapeError
from halocline.hal.formats import check_shape
from halocline.hal.op import implements
from halocline.hal.ops.hyper_connection import StreamRead, read, write
from halocline.hal.runtime import import_provider

__all__ = ["num_prenorm_splits", "read_flashinfer", "write_flashinfer"]

_STREAMS = 4  # hard-wired in the library
_BLOCK_LANES = 64  # DeepGEMM's step over the flattened streams
_MOST_SPLITS = 16
_POST_GAIN = 2.0
_FEW_TOKENS = 128


def _mhc() -> Any:
    return import_provider(FLASHINFER).mhc


def _check_streams(streams_TND: Tensor) -> None:
    _, n, hidden = streams_TND.shape
    if n != _STREAMS or hidden % 8:
        raise ShapeError(
            f"{n} streams of {hidden} lanes: FlashInfer takes {_STREAMS} streams of a multiple of 8; "
            "use hyper_connection.read=triton and hyper_connection.write=triton"
        )


def num_prenorm_splits(lanes: int) -> int:
    """Parts of the flattened streams: a power of two of at most lanes / 64; with more, DeepGEMM's kernel can hang."""
    most = min(_MOST_SPLITS, lanes // _BLOCK_LANES)
    if most < 1:
        raise ShapeError(f"streams of {lanes} lanes in all: DeepGEMM's mixing product needs {_BLOCK_LANES} or more")
    return 1 << (most.bit_length() - 1)


@implements(read)
def read_flashinfer(
    streams_TND: Tensor,
    fn_MC: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
) -> StreamRead:
    """See the contract. Mixing logits are sums of TF32 products."""
    num_tokens, n, hidden = streams_TND.shape
    if num_tokens <= _FEW_TOKENS:
        return read_triton(
            streams_TND,
            fn_MC,
            base_M,
            scale_3,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            sinkhorn_iterations=sinkhorn_iterations,
        )
    _check_streams(streams_TND)
    if n * hidden % _BLOCK_LANES:
        raise ShapeError(
            f"{n} streams of {hidden} lanes: DeepGEMM's mixing product takes a multiple of {_BLOCK_LANES} lanes in "
            "all; use hyper_connection.read=triton"
        )
    check_shape("the mixing matrix", fn_MC, ((2 + n) * n, n * hidden))
    device, lanes = streams_TND.device, n * hidden
    splits = num_prenorm_splits(lanes)
    logits_STM = torch.empty((splits, num_tokens, fn_MC.shape[0]), dtype=torch.float32, device=device)
    squares_ST = torch.empty((splits, num_tokens), dtype=torch.float32, device=device)
    streams_TND = streams_TND.contiguous()
    deep_gemm().tf32_hc_prenorm_gemm(streams_TND.flatten(1), fn_MC, logits_STM, squares_ST, num_splits=splits)
    if splits == 1:
        logits_STM, squares_ST = logits_STM[0], squares_ST[0]
    post_TN1, comb_TNN, x_TD = _mhc().mhc_pre_big_fuse(
        logits_STM,
        squares_ST,
        streams_TND,
        scale_3,
        base_M,
        lanes,
        norm_eps,
        hc_eps,
        hc_eps,
        _POST_GAIN,
        sinkhorn_iterations,
        splits,
    )
    return StreamRead(x_TD, post_TN1.view(num_tokens, n), comb_TNN)


@implements(write)
def write_flashinfer(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """See the contract."""
    _check_streams(streams_TND)
    check_write(y_TD, streams_TND, post_TN, comb_TNN)
    if not y_TD.shape[0]:
        return torch.empty_like(streams_TND)
    found: Tensor = _mhc().mhc_post(y_TD.contiguous(), streams_TND.contiguous(), post_TN, comb_TNN)
    return found
