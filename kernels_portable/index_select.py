"""Exact top-k of scores by radix selection, mapped to cache slots through the page table.

T tokens, S entries, K entries kept, R requests, P pages, C candidates. One program serves one token: its scores stay in
registers while the K-th largest is found and the kept are collected. Ties keep the lowest entries.

Of long rows, programs shortlist chunks first: the best K of each chunk, in order, are the entries of a row that is some
times shorter. What is not among the best of its chunk is not among the best of all, and equals stay in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.radix_search import MOST_IN_TILE, kth_largest, kth_largest_of_tile, ordered_bits

__all__ = ["select_entries"]


_MOST_ENTRIES = 8192  # of a row that one program looks through
_CHUNK = 4096  # entries of a chunk, at least
_FEW_ENTRIES = 2048  # of a row for which a program has a smaller tile


@triton.jit
def _num_candidates(num_entries, LEVELS: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr):
    """What is left of so many entries after some shortlists."""
    for _ in tl.static_range(LEVELS):
        num_entries = num_entries // CHUNK * KEPT + tl.minimum(num_entries % CHUNK, KEPT)
    return num_entries


@triton.jit(do_not_specialize_on_alignment=["entries_ptr", "visible_ptr", "requests_ptr"])
def _shortlist_kernel(
    scores_ptr, scores_stride, entries_ptr, visible_ptr, requests_ptr, out_scores_ptr, out_entries_ptr, out_stride,
    LEVEL: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    if tl.load(requests_ptr + token) < 0:
        return
    size = tl.minimum(_num_candidates(tl.load(visible_ptr + token), LEVEL, KEPT, CHUNK) - first, CHUNK)
    if size <= 0:
        return
    places = tl.arange(0, CHUNK)
    inside = places < size
    row = scores_ptr + token * scores_stride + first
    kept = inside
    if size > KEPT:
        threshold, num_equal = kth_largest(row, size, KEPT, CHUNK)
        bits = ordered_bits(tl.load(row + places, mask=inside, other=0.0))
        is_equal = (inside & (bits == threshold)).to(tl.int32)
        is_first = tl.cumsum(is_equal, axis=0) <= num_equal
        kept = inside & ((bits > threshold) | ((is_equal > 0) & is_first))
    entries = first + places
    if LEVEL > 0:
        entries = tl.load(entries_ptr + token * scores_stride + first + places, mask=kept, other=0)
    scores = tl.load(row + places, mask=kept, other=0.0)
    rank = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    out = token * out_stride + tl.program_id(1) * KEPT + rank
    tl.store(out_scores_ptr + out, scores, mask=kept)
    tl.store(out_entries_ptr + out, entries, mask=kept)


@triton.jit
def _slots_of(entries, mask, request, token_pages_ptr, token_pages_stride, PAGE_ROWS: tl.constexpr):
    page = tl.load(token_pages_ptr + request * token_pages_stride + entries // PAGE_ROWS, mask=mask, other=-1)
    return tl.where(page >= 0, page * PAGE_ROWS + entries % PAGE_ROWS, -1)


@triton.jit
def _entries_at(entries_ptr, places, mask, LEVELS: tl.constexpr):
    """Entries of candidates; without a shortlist a place is an entry."""
    if LEVELS == 0:
        return places
    return tl.load(entries_ptr + places, mask=mask, other=0)


@triton.jit
def _store_kept(bits, inside, slots, threshold, settled, num_equal, before, out_ptr):
    """Stores the slots of kept entries in their order, ties to the lowest.

    `before` counts those of lower entries that are above the threshold, and in its high half those equal to it. Returns
    the counts behind the last entry of this tile.
    """
    is_above = (bits & settled) > threshold
    is_equal = inside & ((bits & settled) == threshold)
    ranks = before + tl.cumsum(is_above.to(tl.uint32) + (is_equal.to(tl.uint32) << 16), axis=0)
    above = (ranks & 65535).to(tl.int32)
    equal = (ranks >> 16).to(tl.int32)
    is_kept = is_above | (is_equal & (equal <= num_equal))
    place = tl.where(is_kept, above + tl.minimum(equal, num_equal) - 1, -1)
    tl.store(out_ptr + place, slots, mask=place >= 0)
    return tl.max(ranks, axis=0)


@triton.jit(
    do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["entries_ptr", "visible_ptr", "requests_ptr"]
)
def _select_entries_kernel(
    logits_ptr, logits_stride, num_entries, entries_ptr, visible_ptr, requests_ptr, token_pages_ptr,
    token_pages_stride, slots_ptr, lengths_ptr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr,
    PAGE_ROWS: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, KEPT_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    scores_ptr = logits_ptr + token * logits_stride
    few = tl.arange(0, FEW)
    scores = tl.load(scores_ptr + few, mask=few < num_entries, other=0.0)  # at once, before it is known how many count
    request = tl.load(requests_ptr + token).to(tl.int64)
    visible = tl.where(request < 0, 0, tl.load(visible_ptr + token))
    visible = _num_candidates(visible, LEVELS, KEPT, CHUNK)
    entries_ptr += token * logits_stride
    out_ptr = slots_ptr + token * KEPT
    length = tl.minimum(visible, KEPT)
    tl.store(lengths_ptr + token, length)
    if visible <= KEPT:
        places = tl.arange(0, KEPT_BLOCK)
        entries = _entries_at(entries_ptr, places, places < visible, LEVELS)
        slots = _slots_of(entries, places < visible, request, token_pages_ptr, token_pages_stride, PAGE_ROWS)
        tl.store(out_ptr + places, slots, mask=places < KEPT)
    elif visible <= FEW:
        inside = few < visible
        # What the end needs is asked for first, so that it is there when the threshold is known.
        entries = _entries_at(entries_ptr, few, inside, LEVELS)
        slots = _slots_of(entries, inside, request, token_pages_ptr, token_pages_stride, PAGE_ROWS)
        bits = tl.where(inside, ordered_bits(scores), 0)
        threshold, settled, num_equal = kth_largest_of_tile(bits, length, FEW)
        _store_kept(bits, inside, slots, threshold, settled, num_equal, tl.zeros((), tl.uint32), out_ptr)
    else:
        many = tl.arange(0, MANY)
        all_scores = tl.load(scores_ptr + many, mask=many < visible, other=0.0)
        all_bits = tl.where(many < visible, ordered_bits(all_scores), 0)
        threshold, settled, num_equal = kth_largest_of_tile(all_bits, length, MANY)
        before = tl.zeros((), tl.uint32)
        for start in range(0, visible, FEW):  # anew from a cache: registers hold one of the two
            places = start + few
            inside = places < visible
            bits = tl.where(inside, ordered_bits(tl.load(scores_ptr + places, mask=inside, other=0.0)), 0)
            entries = _entries_at(entries_ptr, places, inside, LEVELS)
            slots = _slots_of(entries, inside, request, token_pages_ptr, token_pages_stride, PAGE_ROWS)
            before = _store_kept(bits, inside, slots, threshold, settled, num_equal, before, out_ptr)


def _shortlist(
    scores_TC: Tensor,
    entries_TC: Tensor,
    visible_T: Tensor,
    requests_T: Tensor,
    *,
    level: int,
    num_kept: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Scores and entries of the best of each chunk, in order; undefined behind a token's candidates."""
    num_tokens, num_chunks = scores_TC.shape[0], triton.cdiv(scores_TC.shape[1], chunk)
    shape = (num_tokens, num_chunks * num_kept)
    scores = torch.empty(shape, dtype=torch.float32, device=scores_TC.device)
    entries = torch.empty(shape, dtype=torch.int32, device=scores_TC.device)
    _shortlist_kernel[(num_tokens, num_chunks)](
        scores_TC, scores_TC.stride(0), entries_TC, visible_T, requests_T, scores, entries, scores.stride(0),
        LEVEL=level, KEPT=num_kept, CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    return scores, entries


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
    num_tokens = logits_TS.shape[0]
    slots = torch.empty((num_tokens, num_kept), dtype=torch.int32, device=logits_TS.device)
    lengths = torch.empty((num_tokens,), dtype=torch.int32, device=logits_TS.device)
    if not num_tokens:
        return slots, lengths
    chunk = max(_CHUNK, 4 * triton.next_power_of_2(num_kept))
    if chunk > MOST_IN_TILE:
        raise ValueError(f"{num_kept} entries kept: at most {MOST_IN_TILE // 4} can be")
    scores_TC, entries_TC, levels, most = logits_TS, visible_T, 0, max(_MOST_ENTRIES, chunk)
    while scores_TC.shape[1] > most:
        scores_TC, entries_TC = _shortlist(
            scores_TC, entries_TC, visible_T, requests_T, level=levels, num_kept=num_kept, chunk=chunk
        )
        levels += 1
    _select_entries_kernel[(num_tokens,)](
        scores_TC, scores_TC.stride(0), scores_TC.shape[1], entries_TC, visible_T, requests_T, token_pages_RP,
        token_pages_RP.stride(0), slots, lengths, LEVELS=levels, CHUNK=chunk, KEPT=num_kept, PAGE_ROWS=page_rows,
        FEW=min(_FEW_ENTRIES, most), MANY=most, KEPT_BLOCK=triton.next_power_of_2(num_kept), num_warps=8,
    )  # fmt: skip
    return slots, lengths
