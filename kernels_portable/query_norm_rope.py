"""Norm of each query head without a gain, then rotation of its last lanes. T tokens, H heads, D lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.rotary import pair_turns, turn_pairs

__all__ = ["query_norm_rope"]

_HEADS = 4  # heads of one program


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _query_norm_rope_kernel(
    q_ptr, positions_ptr, table_ptr, out_ptr, q_stride, num_heads, eps, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)
    inside = (heads < num_heads)[:, None] & (lanes < WIDTH)[None, :]
    offsets = heads[:, None] * WIDTH + lanes[None, :]
    position = tl.maximum(tl.load(positions_ptr + token), 0)
    positions = tl.zeros((HEADS,), tl.int32) + position
    cos, sin = pair_turns(positions, table_ptr, WIDTH - ROPE, ROPE, LANES)
    q = tl.load(q_ptr + token * q_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, axis=1) / WIDTH + eps)[:, None]
    q = turn_pairs(q, cos, sin, False, HEADS, LANES)
    out = out_ptr + token * num_heads * WIDTH + offsets
    tl.store(out, q.to(out_ptr.dtype.element_ty), mask=inside)


def query_norm_rope(q_THD: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, eps: float) -> Tensor:
    """Norms and rotates queries.

    Args:
        q_THD: (tokens, heads, lanes) bfloat16 or float32, heads and lanes contiguous.
        positions_T: int32 positions; padding (-1) is rotated as position 0.
        cos_sin_PR: (positions, rotary lanes) float32 table.
        eps: Added to the mean square.

    Returns:
        Contiguous, shape and element type of `q_THD`.
    """
    num_tokens, num_heads, width = q_THD.shape
    q_THD = q_THD if q_THD.stride()[1:] == (width, 1) else q_THD.contiguous()
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_tokens:
        _query_norm_rope_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            q_THD, positions_T, cos_sin_PR, out, q_THD.stride(0), num_heads, eps,
            WIDTH=width, ROPE=cos_sin_PR.shape[1], HEADS=_HEADS, LANES=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
    return out
