"""Rounding of activations to E4M3 in groups of 128 lanes with power-of-two scales. T rows, K lanes, G groups."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.number_codes import decode_e4m3, encode_e4m3, power_of_two, scale_exponent

__all__ = [
    "GROUP",
    "ScaleOrder",
    "empty_scales",
    "group_codes",
    "quantize_activation",
    "round_activation",
    "stride_of",
]

ScaleOrder = Literal["rows", "groups"]

GROUP = 128
_GROUPS = 8  # groups of a program
_WHOLE = 4  # rows of 16 bytes of scales


@triton.jit
def group_codes(grouped, FNUZ: tl.constexpr):
    """uint8 E4M3 codes of a float32 (..., groups, lanes) tile, and the int32 exponents of their OCP scales."""
    axis: tl.constexpr = len(grouped.shape) - 1
    amax = tl.max(tl.abs(grouped), axis=axis, keep_dims=True)
    exponent = scale_exponent(tl.maximum(amax, 1e-4), 0x43E00000)
    return encode_e4m3(grouped * power_of_two(-exponent), FNUZ), exponent


def empty_scales(num_rows: int, num_groups: int, order: ScaleOrder, device: torch.device) -> Tensor:
    """float32 (rows, groups) without values, with one row or one group of all rows after the other in memory."""
    if order == "rows":
        return torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    whole = triton.cdiv(num_rows, _WHOLE) * _WHOLE
    return torch.empty((num_groups, whole), dtype=torch.float32, device=device).T[:num_rows]


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_activation_kernel(
    x_ptr, out_ptr, scales_ptr, x_stride, scale_stride, WIDTH: tl.constexpr, CODES: tl.constexpr, FNUZ: tl.constexpr,
    ROWS_FIRST: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    lanes = groups * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row * x_stride + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
    codes, exponent = group_codes(x, FNUZ)
    if CODES:
        tl.store(out_ptr + row * WIDTH + lanes, codes, mask=lanes < WIDTH)
        scale = power_of_two(exponent + (1 if FNUZ else 0))
        num_groups: tl.constexpr = (WIDTH + 127) // 128
        place = row * scale_stride + groups if ROWS_FIRST else groups.to(tl.int64) * scale_stride + row
        tl.store(scales_ptr + place, scale, mask=groups < num_groups)
    else:
        rounded = decode_e4m3(codes, False) * power_of_two(exponent)
        tl.store(out_ptr + row * WIDTH + lanes, rounded.to(out_ptr.dtype.element_ty), mask=lanes < WIDTH)


def stride_of(scales: Tensor, order: ScaleOrder) -> int:
    """Elements from a row of scales to the next, or from a group to the next."""
    return scales.stride(0 if order == "rows" else 1)


def _launch(x: Tensor, out: Tensor, scales: Tensor, *, codes: bool, fnuz: bool, order: ScaleOrder = "rows") -> None:
    width = x.shape[1]
    if x.shape[0]:
        x = x if x.stride(1) == 1 else x.contiguous()
        groups = min(_GROUPS, triton.next_power_of_2(triton.cdiv(width, GROUP)))
        _quantize_activation_kernel[(x.shape[0], triton.cdiv(width, GROUP * groups))](
            x, out, scales, x.stride(0), stride_of(scales, order), WIDTH=width, CODES=codes, FNUZ=fnuz,
            ROWS_FIRST=order == "rows", GROUPS=groups, num_warps=4,
        )  # fmt: skip


def quantize_activation(
    x_TK: Tensor,
    *,
    fp8_dialect: Literal["ocp", "fnuz"],
    scale_order: ScaleOrder = "rows",
    padded_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rounds rows to E4M3.

    Args:
        x_TK: (rows, lanes) bfloat16 or float32; a short last group is a group of its own.
        fp8_dialect: Of the codes. Both dialects stand for the same numbers.
        scale_order: What lies side by side in memory: the scales of a row, or those of a group, of all rows, which are
            padded to whole steps of 16 bytes.
        padded_rows: Rows of the results where there shall be more; those behind the given ones are undefined.

    Returns:
        float8 codes (rows, lanes) and float32 scales (rows, groups).
    """
    fnuz = fp8_dialect == "fnuz"
    kind = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    num_rows, width = padded_rows or x_TK.shape[0], x_TK.shape[1]
    codes = torch.empty((num_rows, width), dtype=kind, device=x_TK.device)
    scales = empty_scales(num_rows, triton.cdiv(width, GROUP), scale_order, x_TK.device)
    _launch(x_TK, codes.view(torch.uint8), scales, codes=True, fnuz=fnuz, order=scale_order)
    return codes, scales


def round_activation(x_TK: Tensor) -> Tensor:
    """Rounds rows to E4M3 and back to their own type, in which the rounded values are exact; see above."""
    out = torch.empty(x_TK.shape, dtype=x_TK.dtype, device=x_TK.device)
    _launch(x_TK, out, out, codes=False, fnuz=False)
    return out
