"""Rotation of attention outputs back to position 0, with or without rounding to E4M3. T tokens, H heads, D lanes."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.number_codes import decode_e4m3, power_of_two
from halocline.kernels_portable.quantize_activation import GROUP, ScaleOrder, empty_scales, group_codes, stride_of
from halocline.kernels_portable.rotary import pair_turns, turn_pairs

__all__ = ["rotate_back", "rotate_back_and_quantize"]

_HEADS = 4  # heads of a program


@triton.jit(do_not_specialize=["scale_stride"], do_not_specialize_on_alignment=["positions_ptr"])
def _rotate_back_kernel(
    x_ptr, positions_ptr, table_ptr, out_ptr, scales_ptr, x_stride, scale_stride, num_heads, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, ROUNDING: tl.constexpr, FNUZ: tl.constexpr, ROWS_FIRST: tl.constexpr, HEADS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)
    inside = (heads < num_heads)[:, None] & (lanes < WIDTH)[None, :]
    offsets = heads[:, None] * WIDTH + lanes[None, :]
    x = tl.load(x_ptr + token * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    positions = tl.zeros((HEADS,), tl.int32) + tl.maximum(tl.load(positions_ptr + token), 0)
    cos, sin = pair_turns(positions, table_ptr, WIDTH - ROPE, ROPE, LANES)
    x = turn_pairs(x, cos, sin, True, HEADS, LANES).to(x_ptr.dtype.element_ty)
    out = out_ptr + token * num_heads * WIDTH + offsets
    if ROUNDING == "none":
        tl.store(out, x, mask=inside)
    else:
        GROUPS: tl.constexpr = LANES // 128
        codes, exponent = group_codes(tl.reshape(x.to(tl.float32), (HEADS, GROUPS, 128)), FNUZ)
        if ROUNDING == "values":
            rounded = tl.reshape(decode_e4m3(codes, False) * power_of_two(exponent), (HEADS, LANES))
            tl.store(out, rounded.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(out, tl.reshape(codes, (HEADS, LANES)), mask=inside)
            scale = tl.reshape(power_of_two(exponent + (1 if FNUZ else 0)), (HEADS, GROUPS))
            group = tl.arange(0, GROUPS)[None, :]
            column = heads[:, None] * (WIDTH // 128) + group
            place = token * scale_stride + column if ROWS_FIRST else column.to(tl.int64) * scale_stride + token
            tl.store(scales_ptr + place, scale, mask=(heads < num_heads)[:, None] & (group < WIDTH // 128))


def _launch(
    x_THD: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    out: Tensor,
    scales: Tensor | None = None,
    *,
    rounding: Literal["none", "values", "codes"],
    order: ScaleOrder = "rows",
    fnuz: bool = False,
) -> None:
    num_tokens, num_heads, width = x_THD.shape
    if rounding != "none" and width % GROUP:
        raise ValueError(f"heads of {width} lanes: groups of {GROUP} lanes would straddle them")
    x_THD = x_THD if x_THD.stride()[1:] == (width, 1) else x_THD.contiguous()
    if num_tokens:
        _rotate_back_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            x_THD, positions_T, cos_sin_PR, out, out if scales is None else scales, x_THD.stride(0),
            0 if scales is None else stride_of(scales, order), num_heads, WIDTH=width, ROPE=cos_sin_PR.shape[1],
            ROUNDING=rounding, FNUZ=fnuz, ROWS_FIRST=order == "rows", HEADS=_HEADS,
            LANES=max(128, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip


def rotate_back(x_THD: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, rounds: bool = False) -> Tensor:
    """Rotates the last lanes of each head back by the token's position.

    Args:
        x_THD: (tokens, heads, lanes) bfloat16 or float32, heads and lanes contiguous.
        positions_T: int32 positions; padding counts as position 0.
        cos_sin_PR: (positions, rotary lanes) float32 table.
        rounds: Whether results are rounded to E4M3 in groups of 128 lanes, and back.

    Returns:
        Contiguous, shape and element type of `x_THD`.
    """
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    _launch(x_THD, positions_T, cos_sin_PR, out, rounding="values" if rounds else "none")
    return out


def rotate_back_and_quantize(
    x_THD: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    fp8_dialect: Literal["ocp", "fnuz"],
    scale_order: ScaleOrder = "rows",
    padded_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates back, rounds to the type of `x_THD`, then to E4M3 in groups of 128 lanes.

    Scales lie in memory as `quantize_activation` says, which also says what padded rows are.

    Returns:
        float8 codes (tokens, heads * lanes) and float32 scales (tokens, heads * lanes / 128).
    """
    num_tokens, num_heads, width = padded_rows or x_THD.shape[0], *x_THD.shape[1:]
    kind = torch.float8_e4m3fnuz if fp8_dialect == "fnuz" else torch.float8_e4m3fn
    codes = torch.empty((num_tokens, num_heads * width), dtype=kind, device=x_THD.device)
    scales = empty_scales(num_tokens, num_heads * width // GROUP, scale_order, x_THD.device)
    _launch(
        x_THD, positions_T, cos_sin_PR, codes.view(torch.uint8), scales, rounding="codes", order=scale_order,
        fnuz=fp8_dialect == "fnuz",
    )  # fmt: skip
    return codes, scales
