"""Index queries: rotation, Walsh-Hadamard transform and rounding. T tokens, H index heads, I lanes."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.hadamard import hadamard_signs
from halocline.kernels_portable.number_codes import (
    decode_e2m1,
    encode_e2m1,
    encode_e4m3,
    power_of_two,
    scale_exponent,
    split_float32,
)
from halocline.kernels_portable.rotary import pair_turns, turn_pairs

__all__ = ["prepare_index_query"]

_HEADS = 32  # heads of one program
_RESULTS = {"ocp": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _index_query_kernel(
    q_ptr, weights_ptr, positions_ptr, table_ptr, out_ptr, weights_out_ptr, q_stride, weights_stride, num_heads, factor,
    ROUNDING: tl.constexpr, FNUZ: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    present = heads < num_heads
    offsets = heads[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    q = tl.load(q_ptr + token * q_stride + offsets, mask=present[:, None], other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + token * weights_stride + heads, mask=present, other=0.0).to(tl.float32) * factor
    positions = tl.zeros((HEADS,), tl.int32) + tl.maximum(tl.load(positions_ptr + token), 0)
    cos, sin = pair_turns(positions, table_ptr, WIDTH - ROPE, ROPE, WIDTH)
    q = turn_pairs(q, cos, sin, False, HEADS, WIDTH)
    signs = hadamard_signs(WIDTH).to(tl.bfloat16)
    if ROUNDING == "none":
        high, middle, low = split_float32(q)
        q = (tl.dot(low, signs) + tl.dot(middle, signs) + tl.dot(high, signs)) * (WIDTH**-0.5)
    else:
        q = (tl.dot(q.to(tl.bfloat16), signs) * (WIDTH**-0.5)).to(tl.bfloat16).to(tl.float32)
    out = out_ptr + token * num_heads * WIDTH + offsets
    if ROUNDING == "fp8_row":
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(q), axis=1), 1e-8), 448.0)
        codes = encode_e4m3(tl.div_rn(q, tl.broadcast_to(scale[:, None], (HEADS, WIDTH))), FNUZ)
        tl.store(out, codes, mask=present[:, None])
        weights *= scale * (2.0 if FNUZ else 1.0)
    elif ROUNDING == "fp4_group32":
        grouped = tl.reshape(q, (HEADS, WIDTH // 32, 32))
        amax = tl.maximum(tl.max(tl.abs(grouped), axis=2), 7.052966104933725e-38)  # 6 * 2 ** -126
        exponent = scale_exponent(amax, 0x40C00000)[:, :, None]
        rounded = decode_e2m1(encode_e2m1(grouped * power_of_two(-exponent))) * power_of_two(exponent)
        tl.store(out, tl.reshape(rounded, (HEADS, WIDTH)).to(out_ptr.dtype.element_ty), mask=present[:, None])
    else:
        tl.store(out, q, mask=present[:, None])
    tl.store(weights_out_ptr + token * num_heads + heads, weights, mask=present)


def prepare_index_query(
    q_THI: Tensor,
    weights_TH: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    rounding: Literal["none", "fp4_group32", "fp8_row"],
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp",
) -> tuple[Tensor, Tensor]:
    """Rotates the last lanes, transforms and rounds.

    Args:
        q_THI: (tokens, heads, lanes) bfloat16 or float32, heads and lanes contiguous; lanes a power of two.
        weights_TH: (tokens, heads) unscaled head weights, heads contiguous.
        positions_T: int32 positions; padding is rotated as position 0.
        cos_sin_PR: (positions, rotary lanes) float32 table.
        rounding: Of the transformed query.
        fp8_dialect: Of E4M3 codes.

    Returns:
        Queries (float32 values for `none`, bfloat16 values for `fp4_group32`, E4M3 codes for `fp8_row`) and float32
        weights * lanes ** -0.5 * heads ** -0.5, times the scale of the codes.
    """
    num_tokens, num_heads, width = q_THI.shape
    q_THI = q_THI if q_THI.stride()[1:] == (width, 1) else q_THI.contiguous()
    kind = {"none": torch.float32, "fp4_group32": torch.bfloat16, "fp8_row": _RESULTS[fp8_dialect]}[rounding]
    out = torch.empty(q_THI.shape, dtype=kind, device=q_THI.device)
    weights = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q_THI.device)
    if num_tokens:
        stored = out.view(torch.uint8) if rounding == "fp8_row" else out
        _index_query_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            q_THI, weights_TH, positions_T, cos_sin_PR, stored, weights, q_THI.stride(0), weights_TH.stride(0),
            num_heads, width**-0.5 * num_heads**-0.5, ROUNDING=rounding, FNUZ=fp8_dialect == "fnuz",
            ROPE=cos_sin_PR.shape[1], WIDTH=width, HEADS=_HEADS, num_warps=4,
        )  # fmt: skip
    return out, weights
