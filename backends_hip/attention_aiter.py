"""Sparse attention by aiter, over gathered bfloat16 rows. Shapes as in `halocline.hal.ops.attention`.

Written after the recorded calls; never run. Both functions take one pool of rows and flat lists of places in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_hip.attention_rows import RowPool, Source, gathered_pages, selected_rows
from halocline.backends_hip.library_calls import library_function
from halocline.backends_triton.attention_triton import check_sources
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionOutput, AttentionPlan, RowSelection, sparse_decode, sparse_prefill
from halocline.hal.ops.kv_cache import CacheHandle

__all__ = ["sparse_decode_aiter", "sparse_prefill_aiter"]

_pa_decode_sparse = library_function("pa_decode_sparse")
_pa_prefill_sparse = library_function("pa_prefill_sparse")


def _sources(
    window: Source, compressed_cache: CacheHandle | None, compressed_rows: RowSelection | None
) -> list[Source]:
    if compressed_cache is None or compressed_rows is None:
        return [window]
    return [window, (compressed_cache, compressed_rows)]


def _finished(out_THD: Tensor, pool: RowPool) -> AttentionOutput:
    return AttentionOutput(out_THD.masked_fill(pool.blind_T()[:, None, None], 0.0), None)


@implements(sparse_decode)
def sparse_decode_aiter(
    plan: AttentionPlan,
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
    sink_H: Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    """See the contract. The library gives no log-sum-exp."""
    check_sources(q_THD, window_cache, window_rows, compressed_cache, compressed_rows)
    if not q_THD.shape[0]:
        return AttentionOutput(torch.empty_like(q_THD), None)
    pool = selected_rows(_sources((window_cache, window_rows), compressed_cache, compressed_rows))
    places, starts = pool.csr()
    out_THD: Tensor = _pa_decode_sparse(
        q=q_THD.contiguous(),
        unified_kv=pool.rows_ND,
        kv_indices=places,
        kv_indptr=starts,
        attn_sink=sink_H,
        softmax_scale=scale,
        has_invalid=True,
    )
    return _finished(out_THD, pool)


@implements(sparse_prefill)
def sparse_prefill_aiter(
    plan: AttentionPlan,
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
    sink_H: Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    """See the contract. The second pool of the call is left out: rows of this step are in the cache already."""
    check_sources(q_THD, window_cache, window_rows, compressed_cache, compressed_rows)
    if not q_THD.shape[0]:
        return AttentionOutput(torch.empty_like(q_THD), None)
    pool = gathered_pages(plan, _sources((window_cache, window_rows), compressed_cache, compressed_rows))
    places, starts = pool.csr()
    out_THD: Tensor = _pa_prefill_sparse(
        q=q_THD.contiguous(),
        unified_kv=pool.rows_ND,
        kv_indices_prefix=places,
        kv_indptr_prefix=starts,
        kv=None,
        kv_indices_extend=None,
        kv_indptr_extend=None,
        attn_sink=sink_H,
        softmax_scale=scale,
        has_invalid=True,
    )
    return _finished(out_THD, pool)
