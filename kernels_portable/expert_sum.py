"""Sum of what the chosen experts of a token gave. T tokens, K chosen, D lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sum_experts"]

_LANES = 512  # lanes of a program


@triton.jit
def _sum_experts_kernel(
    y_ptr, ids_ptr, places_ptr, out_ptr, CHOSEN: tl.constexpr, PLACED: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    for k in tl.static_range(CHOSEN):
        pair = token * CHOSEN + k
        if PLACED:
            row = tl.load(places_ptr + pair).to(tl.int64)
            end = tl.where(row >= 0, WIDTH, 0)
        else:
            row = pair
            end = tl.where(tl.load(ids_ptr + pair) >= 0, WIDTH, 0)
        total += tl.load(y_ptr + row * WIDTH + lanes, mask=lanes < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + lanes, total.to(out_ptr.dtype.element_ty), mask=lanes < WIDTH)


def sum_experts(y_PD: Tensor, ids_TK: Tensor, *, out_dtype: torch.dtype, places_P: Tensor | None = None) -> Tensor:
    """Adds the rows of each token's pairs in float32.

    Args:
        y_PD: Contiguous (tokens * chosen, lanes), the routing weight applied already.
        ids_TK: Contiguous int32 expert of each pair; rows of negative ones are not read.
        out_dtype: Element type of the result.
        places_P: int32 row of each pair, -1 for none, where rows do not lie in the order of pairs.

    Returns:
        (tokens, lanes).
    """
    num_tokens, chosen = ids_TK.shape
    width = y_PD.shape[1]
    out = torch.empty((num_tokens, width), dtype=out_dtype, device=y_PD.device)
    if num_tokens:
        lanes = min(_LANES, triton.next_power_of_2(width))
        _sum_experts_kernel[(num_tokens, triton.cdiv(width, lanes))](
            y_PD, ids_TK, ids_TK if places_P is None else places_P, out, CHOSEN=chosen, PLACED=places_P is not None,
            WIDTH=width, LANES=lanes, num_warps=4,
        )  # fmt: skip
    return out
