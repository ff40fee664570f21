"""Gathering of the pages that a step's prefill reads into bfloat16 rows, and rows' places there. T tokens, K entries.

Pages are gathered whole, each once, however many tokens see it. Nothing waits for the device: the number of pages is
bounded by what the host knows of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.ops.attention import AttentionPlan, RowSelection
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.kernels_portable.row_reader import read_rows

__all__ = ["gather_rows", "workspace_rows"]


def workspace_rows(plan: AttentionPlan, cache: CacheHandle, page_tokens: int) -> int:
    """A bound on the rows of all pages that the requests of a step can refer to.

    Args:
        plan: Of the step.
        cache: Whose pages.
        page_tokens: Positions that a page covers.
    """
    most_pages = max(plan.batch.num_requests, 1) * -(-max(plan.batch.max_seqlen, 1) // page_tokens)
    return min(cache.num_pages, most_pages) * cache.layout.page_rows


def gather_rows(cache: CacheHandle, rows: RowSelection, workspace_ND: Tensor, first: int, count: int) -> Tensor:
    """Copies the pages that a selection names into rows [first, first + count) of a workspace.

    Args:
        cache: Where rows are.
        rows: What is read; slots that lie in no more pages than `count` rows hold.
        workspace_ND: bfloat16 rows, written.
        first: First row for this cache.
        count: From `workspace_rows`.

    Returns:
        int32 (T, K) rows in the workspace; -1 where the selection has a hole or ends.
    """
    page_rows, num_pages, device = cache.layout.page_rows, cache.num_pages, workspace_ND.device
    slots_TK = rows.slots_TK
    columns = torch.arange(slots_TK.shape[1], device=device, dtype=torch.int32)
    seen_TK = (slots_TK >= 0) & (columns < rows.lengths_T[:, None])
    page_TK = torch.where(seen_TK, slots_TK // page_rows, num_pages)
    used_P = torch.zeros((num_pages + 1,), dtype=torch.int32, device=device)
    used_P.index_fill_(0, page_TK.flatten().long(), 1)
    place_P = torch.cumsum(used_P[:num_pages], 0) - 1
    most_pages = count // page_rows
    target_P = torch.where(used_P[:num_pages] > 0, place_P, most_pages).clamp_max(most_pages)
    page_of = torch.full((most_pages + 1,), -1, dtype=torch.int64, device=device)
    page_of.scatter_(0, target_P, torch.arange(num_pages, device=device))
    read_P = page_of[:most_pages, None]
    slots_N = torch.where(read_P >= 0, read_P * page_rows + torch.arange(page_rows, device=device), -1).flatten()
    read_rows(cache.pages, cache.layout, slots_N, out_ND=workspace_ND[first : first + count])
    place_TK = place_P[page_TK.clamp_max(num_pages - 1).long()] * page_rows + slots_TK % page_rows + first
    return torch.where(seen_TK, place_TK, -1).int()
