"""The indexer by aiter. Shapes as in `halocline.hal.ops.indexer`. Written after the recorded calls; never run."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_hip.library_calls import library_function
from halocline.backends_triton.indexer_triton import num_index_entries
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan, RowSelection
from halocline.hal.ops.indexer import IndexQuery, logits, select
from halocline.hal.ops.kv_cache import CacheHandle

__all__ = ["logits_aiter", "select_aiter"]

_paged_mqa_logits = library_function("deepgemm_fp8_paged_mqa_logits")
_top_k_per_row = library_function("top_k_per_row_prefill")
_SCALE_BYTES = 4


def _key_rows(plan: AttentionPlan, cache: CacheHandle) -> tuple[Tensor, int]:
    """Key rows of every request of a step, one behind the other, each with its scale behind its codes.

    Returns:
        uint8 (requests * entries, 1, 1, width + 4), and the entries of one request.
    """
    rows, width = cache.layout.page_rows, cache.layout.width
    pages_RP = plan.batch.token_pages_RP.clamp_min(0).long()
    pages = cache.pages[pages_RP.flatten(), : rows * (width + _SCALE_BYTES)]
    codes = pages[:, : rows * width].view(-1, rows, width)
    scales = pages[:, rows * width :].reshape(-1, rows, _SCALE_BYTES)
    joined = torch.cat([codes, scales], dim=-1).view(-1, 1, 1, width + _SCALE_BYTES)
    return joined, pages_RP.shape[1] * rows


@implements(logits)
def logits_aiter(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> Tensor:
    """See the contract. The library wants each key's scale behind its codes, so keys are gathered in each call."""
    num_tokens, _, width = query.q_THI.shape
    if cache.layout.width != width or query.q_THI.element_size() != 1:
        raise ShapeError(f"{query.q_THI.dtype} index queries of {width} lanes against keys of {cache.layout.width}")
    entries, device = num_index_entries(plan), query.q_THI.device
    out_TS = torch.empty((num_tokens, entries), dtype=torch.float32, device=device)
    if not num_tokens:
        return out_TS
    stop = first_token + num_tokens
    keys, entries_of_request = _key_rows(plan, cache)
    first_T = plan.batch.token_requests_T[first_token:stop].clamp_min(0) * entries_of_request
    places_TS = first_T[:, None] + torch.arange(entries, dtype=torch.int32, device=device)
    _paged_mqa_logits(
        q_fp8=query.q_THI.contiguous()[:, None],
        kv_cache=keys,
        weights=query.weights_TH.contiguous(),
        out_logits=out_TS,
        context_lens=plan.visible[4][first_token:stop].contiguous(),
        kv_indices=places_TS.int().contiguous(),
        max_model_len=entries,
        Preshuffle=False,
        KVBlockSize=1,
    )
    return out_TS


@implements(select)
def select_aiter(
    plan: AttentionPlan, logits_TS: Tensor, *, first_token: int, num_kept: int, page_rows: int
) -> RowSelection:
    """See the contract. Entries become slots through the page table here."""
    if logits_TS.shape[1] < num_index_entries(plan):
        raise ShapeError(f"logits for {logits_TS.shape[1]} entries, up to {num_index_entries(plan)} are visible")
    num_tokens, device = logits_TS.shape[0], logits_TS.device
    stop = first_token + num_tokens
    visible_T = plan.visible[4][first_token:stop]
    entries_TK = torch.full((num_tokens, num_kept), -1, dtype=torch.int32, device=device)
    if num_tokens:
        logits_TS = logits_TS.contiguous()
        _top_k_per_row(
            logits=logits_TS,
            rowStarts=torch.zeros_like(visible_T),
            rowEnds=visible_T.contiguous(),
            indices=entries_TK,
            values=None,
            numRows=num_tokens,
            stride0=logits_TS.stride(0),
            stride1=logits_TS.stride(1),
            k=num_kept,
        )
    requests_T = plan.batch.token_requests_T[first_token:stop].clamp_min(0).long()
    pages_TK = plan.batch.token_pages_RP[requests_T].gather(1, (entries_TK.clamp_min(0) // page_rows).long())
    slots_TK = pages_TK * page_rows + entries_TK.clamp_min(0) % page_rows
    lengths_T = visible_T.clamp_max(num_kept)
    columns = torch.arange(num_kept, dtype=torch.int32, device=device)
    return RowSelection(torch.where(columns < lengths_T[:, None], slots_TK, -1).int(), lengths_T)
