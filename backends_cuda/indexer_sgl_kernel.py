"""Index queries by sgl_kernel. Shapes as in `halocline.hal.ops.indexer`.

One kernel rotates the last 64 lanes, transforms, rounds to E4M3 and folds the scale into the head weights. It reads
the rotary table as ours is laid out, and reads in front of it at position -1. It takes head weights in bfloat16, and
ours are float32: so it is given ones, and what it returns is the scale. A row whose largest value is below 1e-4 is
rounded as if that were its largest, so that less than the contract's digits are left of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from halocline.backends_cuda.sgl_kernel_library import aligned, sgl_kernel_ops
from halocline.backends_triton.indexer_triton import check_index_query
from halocline.backends_triton.step_state import once_per_step
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.indexer import IndexQuery, prepare_query
from halocline.hal.ops.rope import RopeTable

__all__ = ["prepare_query_sgl_kernel"]

_OWNER = "index_query_sgl_kernel"
_WIDTH, _ROPE_WIDTH = 128, 64  # hard-wired in the library


@implements(prepare_query)
def prepare_query_sgl_kernel(
    plan: AttentionPlan,
    q_THI: Tensor,
    weights_TH: Tensor,
    rope: RopeTable,
    *,
    rounding: Literal["none", "fp4_group32", "fp8_row"],
) -> IndexQuery:
    """See the contract."""
    check_index_query(q_THI, weights_TH)
    num_tokens, num_heads, width = q_THI.shape
    asked = (rounding, q_THI.dtype, width, rope.rope_width)
    if asked != ("fp8_row", torch.bfloat16, _WIDTH, _ROPE_WIDTH):
        raise ShapeError(
            f"{rounding} queries from {q_THI.dtype}, {width} lanes of which {rope.rope_width} rotate: sgl_kernel takes "
            f"fp8_row from bfloat16, {_WIDTH} lanes of which {_ROPE_WIDTH} rotate; use indexer.prepare_query=triton"
        )

    def read_plan() -> tuple[Tensor, Tensor]:
        ones_TH = torch.ones((num_tokens, num_heads), dtype=torch.bfloat16, device=q_THI.device)
        return plan.batch.positions_T.clamp_min(0), ones_TH

    positions_T, ones_TH = once_per_step(plan, _OWNER, (num_tokens, num_heads), read_plan)
    codes_THI = torch.empty(q_THI.shape, dtype=torch.float8_e4m3fn, device=q_THI.device)
    scale_TH1 = torch.empty((num_tokens, num_heads, 1), dtype=torch.float32, device=q_THI.device)
    if num_tokens:
        sgl_kernel_ops().dsv4_fused_q_indexer_rope_hadamard_quant.default(
            aligned(q_THI),
            codes_THI,
            ones_TH,
            scale_TH1,
            (width * num_heads) ** -0.5,
            rope.cos_sin_PR,
            positions_T,
        )
    return IndexQuery(codes_THI, weights_TH.float() * scale_TH1.squeeze(-1))
