"""Exact top-k of scores by radix selection, mapped to cache slots through the page table.

T tokens, S entries, K entries kept, R requests, P pages. One program serves one token: four passes over its scores
find the K-th largest, one pass collects. Ties keep the lowest entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.radix_search import kth_largest, ordered_bits

__all__ = ["select_entries"]


@triton.jit
def _slots_of(entries, mask, request, token_pages_ptr, token_pages_stride, PAGE_ROWS: tl.constexpr):
    page = tl.load(token_pages_ptr + request * token_pages_stride + entries // PAGE_ROWS, mask=mask, other=-1)
    return tl.where(page >= 0, page * PAGE_ROWS + entries % PAGE_ROWS, -1)


@triton.jit
def _select_entries_kernel(
    logits_ptr, logits_stride, visible_ptr, requests_ptr, token_pages_ptr, token_pages_stride, slots_ptr, lengths_ptr,
    KEPT: tl.constexpr, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr, KEPT_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_ptr + token).to(tl.int64)
    visible = tl.where(request < 0, 0, tl.load(visible_ptr + token))
    scores_ptr = logits_ptr + token * logits_stride
    out_ptr = slots_ptr + token * KEPT
    length = tl.minimum(visible, KEPT)
    tl.store(lengths_ptr + token, length)
    if visible <= KEPT:
        entries = tl.arange(0, KEPT_BLOCK)
        slots = _slots_of(entries, entries < visible, request, token_pages_ptr, token_pages_stride, PAGE_ROWS)
        tl.store(out_ptr + entries, slots, mask=entries < KEPT)
    else:
        threshold, num_equal = kth_largest(scores_ptr, visible, length, BLOCK)
        above = tl.zeros((), tl.int32)
        equal = tl.zeros((), tl.int32)
        for start in range(0, visible, BLOCK):
            entries = start + tl.arange(0, BLOCK)
            inside = entries < visible
            bits = ordered_bits(tl.load(scores_ptr + entries, mask=inside, other=0.0))
            is_above = (inside & (bits > threshold)).to(tl.int32)
            is_equal = (inside & (bits == threshold)).to(tl.int32)
            rank = equal + tl.cumsum(is_equal, axis=0) - is_equal
            place = tl.where(is_above > 0, above + tl.cumsum(is_above, axis=0) - is_above, KEPT - num_equal + rank)
            kept = (is_above > 0) | ((is_equal > 0) & (rank < num_equal))
            slots = _slots_of(entries, kept, request, token_pages_ptr, token_pages_stride, PAGE_ROWS)
            tl.store(out_ptr + place, slots, mask=kept)
            above += tl.sum(is_above, axis=0)
            equal += tl.sum(is_equal, axis=0)


def select_entries(
    logits_TS: Tensor,
    visible_T: Tensor,
    requests_T: Tensor,
    token_pages_RP: Tensor,
    *,
    num_kept: int,
    page_rows: int,
) -> tuple[Tensor, Tensor]:
    """Keeps the entries with the highest scores.

    Args:
        logits_TS: (tokens, entries) float32, entries contiguous; undefined at and behind a token's visible count.
        visible_T: int32 entries that each token sees.
        requests_T: int32 request of each token; -1 on padding, which keeps nothing.
        token_pages_RP: int32 pages of each request; -1 where there is none.
        num_kept: Entries kept.
        page_rows: Entries of a page.

    Returns:
        int32 slots (tokens, num_kept), -1 behind the length, and int32 lengths min(num_kept, visible).
    """
    num_tokens, num_entries = logits_TS.shape
    slots = torch.empty((num_tokens, num_kept), dtype=torch.int32, device=logits_TS.device)
    lengths = torch.empty((num_tokens,), dtype=torch.int32, device=logits_TS.device)
    if num_tokens:
        block = min(2048, max(256, triton.next_power_of_2(num_entries)))
        _select_entries_kernel[(num_tokens,)](
            logits_TS, logits_TS.stride(0), visible_T, requests_T, token_pages_RP, token_pages_RP.stride(0), slots,
            lengths, KEPT=num_kept, PAGE_ROWS=page_rows, BLOCK=block, KEPT_BLOCK=triton.next_power_of_2(num_kept),
            num_warps=8 if block > 1024 else 4,
        )  # fmt: skip
    return slots, lengths
