"""The compressor by the portable kernel. Shapes as in `halocline.hal.ops.compressor`."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_triton.step_state import once_per_step
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.compressor import CompressorState, insert
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable
from halocline.kernels_portable.compressor_insert import (
    MOST_ARRIVALS,
    StepRequests,
    insert_entries,
    most_tokens_of_a_request,
    shares_blocks,
)
from halocline.kernels_portable.target import target_of

__all__ = ["insert_triton"]


@implements(insert)
def insert_triton(
    plan: AttentionPlan,
    values_TC: Tensor,
    scores_TC: Tensor,
    position_bias_RC: Tensor,
    norm_weight_D: Tensor,
    rope: RopeTable,
    state: CompressorState,
    cache: CacheHandle,
    *,
    eps: float,
) -> None:
    """See the contract."""
    ratio, width = state.ratio, cache.layout.width
    lanes = width * (2 if ratio == 4 else 1)
    if values_TC.shape[1:] != (lanes,) or position_bias_RC.shape != (ratio, lanes):
        raise ShapeError(
            f"values {tuple(values_TC.shape)} and bias {tuple(position_bias_RC.shape)} "
            f"for ratio {ratio} and entries of {width} lanes"
        )
    batch = plan.batch
    step = StepRequests(
        positions_T=batch.positions_T,
        requests_T=batch.token_requests_T,
        query_starts_R1=batch.query_starts_R1,
        seqlens_R=batch.seqlens_R,
        state_slots_R=batch.state_slots_R,
        token_pages_RP=batch.token_pages_RP,
        most_tokens=most_tokens_of_a_request(batch.num_tokens, batch.num_decode_tokens, batch.num_decode_requests),
        arrivals_T=_arrivals(plan, values_TC, ratio),
    )
    insert_entries(
        step,
        values_TC,
        scores_TC,
        position_bias_RC,
        norm_weight_D,
        rope.cos_sin_PR,
        state.rows_SB2C,
        cache.pages,
        cache.layout,
        ratio=ratio,
        transform=cache.layout.kind == "index_key",
        eps=eps,
    )


def _arrivals(plan: AttentionPlan, values_TC: Tensor, ratio: int) -> Tensor | None:
    """Zeros for the programs that share a block; the launches of a step leave zeros, and so use the same.

    None on waves of 64 lanes: before a barrier they do not wait for what they stored, and the release of one thread
    waits for the stores of its own wave only.
    """
    num_tokens, device = values_TC.shape[0], values_TC.device
    if target_of(device).wave_size != 32 or not shares_blocks(num_tokens, ratio):
        return None
    return once_per_step(
        plan, "compressor.insert", (), lambda: torch.zeros((MOST_ARRIVALS,), dtype=torch.int32, device=device)
    )
