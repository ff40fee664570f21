"""Cached rows as one pool of bfloat16 rows, for libraries that read neither our pages nor our FP8 rows.

T tokens, K entries of a joined selection, N rows of the pool, D lanes. Rows are read by the portable reader, so that
both FP8 dialects arrive as the same numbers. Nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halocline.backends_triton.prefill_workspace import gather_rows, workspace_rows
from halocline.hal.ops.attention import AttentionPlan, RowSelection
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.kernels_portable.row_reader import read_rows

__all__ = ["RowPool", "Source", "gathered_pages", "selected_rows"]

Source = tuple[CacheHandle, RowSelection]


class RowPool(NamedTuple):
    """Rows and where each token finds its own: bfloat16 (N, D) rows, int32 (T, K) places in them, -1 for none."""

    rows_ND: Tensor
    places_TK: Tensor

    def csr(self) -> tuple[Tensor, Tensor]:
        """Places as one flat list, holes included, and int32 (T + 1) where each token's part starts."""
        num_tokens, width = self.places_TK.shape
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=self.places_TK.device) * width
        return self.places_TK.flatten(), starts

    def blind_T(self) -> Tensor:
        """Tokens that see no row; contracts want zeros for them whatever a library makes of them."""
        return (self.places_TK < 0).all(dim=1)


def _seen(rows: RowSelection) -> Tensor:
    columns = torch.arange(rows.slots_TK.shape[1], dtype=torch.int32, device=rows.slots_TK.device)
    return (rows.slots_TK >= 0) & (columns < rows.lengths_T[:, None])


def selected_rows(sources: list[Source]) -> RowPool:
    """The rows that few tokens see, each token's beside each other."""
    parts, places, first = [], [], 0
    for cache, rows in sources:
        seen_TK = _seen(rows)
        slots_N = torch.where(seen_TK, rows.slots_TK, -1).flatten()
        parts.append(read_rows(cache.pages, cache.layout, slots_N, dtype=torch.bfloat16))
        order = torch.arange(slots_N.shape[0], dtype=torch.int32, device=slots_N.device).view(seen_TK.shape) + first
        places.append(torch.where(seen_TK, order, -1))
        first += slots_N.shape[0]
    return RowPool(torch.cat(parts), torch.cat(places, dim=1))


def gathered_pages(plan: AttentionPlan, sources: list[Source]) -> RowPool:
    """The pages that a step's tokens see, each once, however many tokens see it."""
    geometry = plan.geometry
    tokens_of_page = (geometry.window_page_rows, geometry.page_tokens)
    counts = [
        workspace_rows(plan, cache, covered) for (cache, _), covered in zip(sources, tokens_of_page, strict=False)
    ]
    rows_ND = torch.empty(
        (sum(counts), sources[0][0].layout.width), dtype=torch.bfloat16, device=sources[0][0].pages.device
    )
    places, first = [], 0
    for (cache, rows), count in zip(sources, counts, strict=True):
        places.append(gather_rows(cache, rows, rows_ND, first, count))
        first += count
    return RowPool(rows_ND, torch.cat(places, dim=1))
