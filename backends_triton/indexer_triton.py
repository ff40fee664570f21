"""The indexer by the portable kernels. Shapes as in `halocline.hal.ops.indexer`."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from halocline.backends_triton.device_facts import fp8_dialect_of
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan, RowSelection
from halocline.hal.ops.indexer import IndexQuery, logits, prepare_query, select
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable
from halocline.kernels_portable.index_logits import index_logits, logit_tiles
from halocline.kernels_portable.index_query import prepare_index_query
from halocline.kernels_portable.index_select import select_entries
from halocline.kernels_portable.target import target_of

__all__ = ["check_index_query", "logits_triton", "num_index_entries", "prepare_query_triton", "select_triton"]


def check_index_query(q_THI: Tensor, weights_TH: Tensor) -> None:
    """Checks what the contract of index queries promises to check.

    Raises:
        ShapeError: If heads differ or the width is no power of two.
    """
    _, num_heads, width = q_THI.shape
    if weights_TH.shape[1] != num_heads:
        raise ShapeError(f"{num_heads} index heads but {weights_TH.shape[1]} head weights")
    if width & (width - 1):
        raise ShapeError(f"a Walsh-Hadamard transform of {width} lanes: the width must be a power of two")


def num_index_entries(plan: AttentionPlan) -> int:
    """Columns of a step's index logits; a bound known on the host."""
    return max(plan.batch.max_seqlen // 4, 1)


@implements(prepare_query)
def prepare_query_triton(
    plan: AttentionPlan,
    q_THI: Tensor,
    weights_TH: Tensor,
    rope: RopeTable,
    *,
    rounding: Literal["none", "fp4_group32", "fp8_row"],
) -> IndexQuery:
    """See the contract."""
    check_index_query(q_THI, weights_TH)
    return IndexQuery(
        *prepare_index_query(
            q_THI,
            weights_TH if weights_TH.stride(1) == 1 else weights_TH.contiguous(),
            plan.batch.positions_T,
            rope.cos_sin_PR,
            rounding=rounding,
            fp8_dialect=fp8_dialect_of(q_THI.device),
        )
    )


@implements(logits)
def logits_triton(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> Tensor:
    """See the contract."""
    num_tokens, _, width = query.q_THI.shape
    if cache.layout.width != width:
        raise ShapeError(f"index queries of {width} lanes against keys of {cache.layout.width}")
    stop = first_token + num_tokens
    return index_logits(
        query.q_THI.contiguous(),
        query.weights_TH.contiguous(),
        plan.visible[4][first_token:stop],
        plan.batch.token_requests_T[first_token:stop],
        plan.batch.token_pages_RP,
        cache.pages,
        cache.layout,
        num_entries=num_index_entries(plan),
        tiles=logit_tiles(target_of(query.q_THI.device), query.q_THI.dtype),
    )


@implements(select)
def select_triton(
    plan: AttentionPlan, logits_TS: Tensor, *, first_token: int, num_kept: int, page_rows: int
) -> RowSelection:
    """See the contract."""
    if logits_TS.shape[1] < num_index_entries(plan):
        raise ShapeError(f"logits for {logits_TS.shape[1]} entries, up to {num_index_entries(plan)} are visible")
    stop = first_token + logits_TS.shape[0]
    slots_TK, lengths_T = select_entries(
        logits_TS if logits_TS.stride(1) == 1 else logits_TS.contiguous(),
        plan.visible[4][first_token:stop],
        plan.batch.token_requests_T[first_token:stop],
        plan.batch.token_pages_RP,
        num_kept=num_kept,
        page_rows=page_rows,
    )
    return RowSelection(slots_TK, lengths_T)
