"""The compressor by the portable kernel. Shapes as in `halocline.hal.ops.compressor`."""

from __future__ import annotations

from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.compressor import CompressorState, insert
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable
from halocline.kernels_portable.compressor_insert import StepRequests, insert_entries, most_tokens_of_a_request

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
