"""Norms by FlashInfer, which compiles the kernel at its first call: half a minute with nvcc, unless it comes built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halocline.backends_cuda.manifest import FLASHINFER
from halocline.backends_cuda.norm_sgl_kernel import norm_operands
from halocline.hal.op import implements
from halocline.hal.ops.norm import rms_norm
from halocline.hal.runtime import import_provider

__all__ = ["rms_norm_flashinfer"]


def _norm() -> Any:
    return import_provider(FLASHINFER).norm


@implements(rms_norm)
def rms_norm_flashinfer(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """See the contract. Rows come on two axes: on three, the library has another kernel, for heads."""
    rows_TD, gain_D = norm_operands(x_TD, weight_D)
    out_TD = torch.empty_like(rows_TD)
    if out_TD.numel():
        _norm().rmsnorm(rows_TD, gain_D, eps, out=out_TD, enable_pdl=False)
    return out_TD.view(x_TD.shape)
