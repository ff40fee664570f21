"""Index logits by the portable tilelang kernel. Shapes as in `halocline.hal.ops.indexer`."""

from __future__ import annotations

from torch import Tensor

from halocline.backends_triton.indexer_triton import num_index_entries
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.indexer import IndexQuery, logits
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.kernels_portable.target import target_of
from halocline.kernels_portable.tilelang_index_logits import index_logits_tilelang

__all__ = ["logits_tilelang"]


@implements(logits)
def logits_tilelang(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> Tensor:
    """See the contract."""
    num_tokens, _, width = query.q_THI.shape
    if cache.layout.width != width:
        raise ShapeError(f"index queries of {width} lanes against keys of {cache.layout.width}")
    stop = first_token + num_tokens
    return index_logits_tilelang(
        query.q_THI.contiguous(),
        query.weights_TH.contiguous(),
        plan.visible[4][first_token:stop],
        plan.batch.token_requests_T[first_token:stop],
        plan.batch.token_pages_RP,
        cache.pages,
        cache.layout,
        num_entries=num_index_entries(plan),
        target=target_of(query.q_THI.device),
    )
