"""Norms by sgl_kernel, whose kernel is FlashInfer's."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_cuda.sgl_kernel_library import aligned, sgl_kernel_ops
from halocline.backends_triton.norm_triton import check_gain
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.norm import rms_norm

__all__ = ["norm_operands", "rms_norm_sgl_kernel"]

_MOST_ELEMENTS = 2**32  # the kernel finds a row by a product of 32 bits


def norm_operands(x_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """Rows on two axes, and the gain, as FlashInfer's kernel reads them.

    Raises:
        ShapeError: If the gain has another width, or for what the kernel would misread: it takes the gain to be of
            the element type of the rows, whatever it is.
    """
    check_gain(x_TD, weight_D)
    if (x_TD.dtype, weight_D.dtype) != (torch.bfloat16, torch.bfloat16):
        raise ShapeError(
            f"rows of {x_TD.dtype} and a gain of {weight_D.dtype}: the kernel takes bfloat16 for both; "
            "use norm.rms_norm=triton"
        )
    if x_TD.numel() >= _MOST_ELEMENTS:
        raise ShapeError(f"{x_TD.numel()} elements: the kernel takes fewer than 2**32; use norm.rms_norm=triton")
    return aligned(x_TD.reshape(-1, x_TD.shape[-1])), aligned(weight_D)


@implements(rms_norm)
def rms_norm_sgl_kernel(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """See the contract."""
    rows_TD, gain_D = norm_operands(x_TD, weight_D)
    out_TD = torch.empty_like(rows_TD)
    if out_TD.numel():
        # Not launched before the kernel in front has ended, as none of our own is.
        sgl_kernel_ops().rmsnorm.default(out_TD, rows_TD, gain_D, eps, False)
    return out_TD.view(x_TD.shape)
