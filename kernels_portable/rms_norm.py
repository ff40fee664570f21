"""Root-mean-square norm of rows with a gain. T rows, D lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rms_norm"]


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, eps, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    x = tl.load(x_ptr + row * x_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + lanes, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Divides rows by their root mean square and multiplies by a gain.

    Args:
        x_TD: (..., lanes) bfloat16 or float32; rows may be strided if there is one leading axis.
        weight_D: (lanes,) gain.
        eps: Added to the mean square.

    Returns:
        Contiguous, shape and element type of `x_TD`.
    """
    width = x_TD.shape[-1]
    rows = x_TD if x_TD.dim() == 2 and x_TD.stride(1) == 1 else x_TD.contiguous().view(-1, width)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if rows.shape[0]:
        lanes = triton.next_power_of_2(width)
        _rms_norm_kernel[(rows.shape[0],)](
            rows, weight_D, out, rows.stride(0), eps, WIDTH=width, LANES=lanes, num_warps=8 if lanes > 2048 else 4
        )
    return out
