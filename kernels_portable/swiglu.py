"""Clamped SwiGLU, with the routing weight and the rounding of the next product's input. P rows, I lanes, G groups."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.number_codes import decode_e4m3, power_of_two
from halocline.kernels_portable.quantize_activation import GROUP, group_codes

__all__ = ["Activated", "swiglu"]

_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
_GROUPS = 4  # groups of 128 lanes of a program


class Activated(NamedTuple):
    """Rows (P, I) and, for E4M3 codes, their float32 scales (P, G)."""

    rows_PI: Tensor
    scales_PG: Tensor | None


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, weights_ptr, ids_ptr, out_ptr, scales_ptr, stride, limit, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
    CLAMPED: tl.constexpr, ROUNDING: tl.constexpr, FNUZ: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if WEIGHTED:
        if tl.load(ids_ptr + row) < 0:
            return
        factor = tl.load(weights_ptr + row).to(tl.float32)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    lanes = groups * 128 + tl.arange(0, 128)[None, :]
    inside = lanes < WIDTH
    gate = tl.load(gate_up_ptr + row * stride + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + WIDTH + lanes, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    u = gate * tl.sigmoid(gate) * up * factor
    out = out_ptr + row * WIDTH + lanes
    u = u.to(KIND)
    if ROUNDING == "none":
        tl.store(out, u, mask=inside)
    else:
        codes, exponent = group_codes(u.to(tl.float32), FNUZ)
        if ROUNDING == "codes":
            tl.store(out, codes, mask=inside)
            num_groups: tl.constexpr = (WIDTH + 127) // 128
            scale = power_of_two(exponent + (1 if FNUZ else 0))
            tl.store(scales_ptr + row * num_groups + groups, scale, mask=groups < num_groups)
        else:
            rounded = decode_e4m3(codes, False) * power_of_two(exponent)
            tl.store(out, rounded.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(
    gate_up_PI2: Tensor,
    *,
    limit: float,
    weights_P: Tensor | None = None,
    ids_P: Tensor | None = None,
    dtype: torch.dtype | None = None,
    rounding: Literal["none", "values", "codes"] = "none",
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp",
) -> Activated:
    """Computes weight * silu(min(gate, limit)) * clamp(up, -limit, limit), rounded as asked.

    Args:
        gate_up_PI2: (rows, 2 * width) bfloat16 or float32: gate lanes, then up lanes.
        limit: Clamp before the product; 0 means none. The gate is clamped from above only.
        weights_P: float32 routing weights, or None for 1.
        ids_P: int32 expert of each row; rows of negative ones are left undefined. Given with the weights.
        dtype: Type to which results are rounded first; that of the input when left out.
        rounding: `none`; `values` rounds to E4M3 in groups of 128 lanes and back; `codes` gives E4M3 codes and scales.
        fp8_dialect: Of the codes.

    Returns:
        Rows of that type, or codes and scales.
    """
    num_rows, width = gate_up_PI2.shape[0], gate_up_PI2.shape[1] // 2
    gate_up_PI2 = gate_up_PI2 if gate_up_PI2.stride(1) == 1 else gate_up_PI2.contiguous()
    fnuz = fp8_dialect == "fnuz"
    device, dtype = gate_up_PI2.device, dtype or gate_up_PI2.dtype
    scales: Tensor | None = None
    if rounding == "codes":
        out = torch.empty(
            (num_rows, width), dtype=torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn, device=device
        )
        scales = torch.empty((num_rows, triton.cdiv(width, GROUP)), dtype=torch.float32, device=device)
    else:
        out = torch.empty((num_rows, width), dtype=dtype, device=device)
    if num_rows:
        groups = min(_GROUPS, triton.next_power_of_2(triton.cdiv(width, GROUP)))
        _swiglu_kernel[(num_rows, triton.cdiv(width, GROUP * groups))](
            gate_up_PI2, weights_P if weights_P is not None else out, ids_P if ids_P is not None else out,
            out.view(torch.uint8) if scales is not None else out, scales if scales is not None else out,
            gate_up_PI2.stride(0), limit, WIDTH=width, WEIGHTED=weights_P is not None, CLAMPED=limit > 0,
            ROUNDING=rounding, FNUZ=fnuz, GROUPS=groups,
            KIND=_KINDS[dtype], num_warps=4,
        )  # fmt: skip
    return Activated(out, scales)
