"""Sparse prefill by tokenspeed-kernel-amd, over gathered bfloat16 rows. Shapes as in `halocline.hal.ops.attention`.

Written after the call read in its wheel; never run. The package brings kernels for one architecture only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_hip.attention_rows import Source, gathered_pages
from halocline.backends_hip.library_calls import library_function
from halocline.backends_triton.attention_triton import check_sources
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionOutput, AttentionPlan, RowSelection, sparse_prefill
from halocline.hal.ops.kv_cache import CacheHandle

__all__ = ["sparse_prefill_tokenspeed"]

_prefill = library_function("launch_gluon_dsv4_prefill_gfx950")


@implements(sparse_prefill)
def sparse_prefill_tokenspeed(
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
    """See the contract. The library gives no log-sum-exp; negative places are its holes."""
    check_sources(q_THD, window_cache, window_rows, compressed_cache, compressed_rows)
    if not q_THD.shape[0]:
        return AttentionOutput(torch.empty_like(q_THD), None)
    sources: list[Source] = [(window_cache, window_rows)]
    if compressed_cache is not None and compressed_rows is not None:
        sources.append((compressed_cache, compressed_rows))
    pool = gathered_pages(plan, sources)
    lengths_T = torch.full((q_THD.shape[0],), pool.places_TK.shape[1], dtype=torch.int32, device=pool.places_TK.device)
    out_THD: Tensor = _prefill(
        q=q_THD.contiguous(),
        kv=pool.rows_ND,
        indices=pool.places_TK.contiguous(),
        lens=lengths_T,
        attn_sink=sink_H,
        softmax_scale=scale,
    )
    return AttentionOutput(out_THD.masked_fill(pool.blind_T()[:, None, None], 0.0), None)
