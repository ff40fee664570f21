"""Row selections of a step: window slots, closed blocks, and all compressed rows, from positions and page tables.

T tokens, R requests, P pages, W positions of the window, K entries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["plan_entries", "plan_window"]

_ENTRIES = 1024  # entries of a program


@triton.jit
def _slots(pages_ptr, pages_stride, num_pages, request, rows, wanted, PAGE_ROWS: tl.constexpr):
    """Slots of a request's rows; -1 where a row is not wanted or has no page."""
    column = rows // PAGE_ROWS
    wanted = wanted & (column < num_pages)
    page = tl.load(pages_ptr + request * pages_stride + column, mask=wanted, other=-1).to(tl.int64)
    return tl.where(page >= 0, page * PAGE_ROWS + rows % PAGE_ROWS, -1)


@triton.jit
def _plan_window_kernel(
    positions_ptr, requests_ptr, pages_ptr, pages_stride, num_pages, own_ptr, slots_ptr, slots_stride, lengths_ptr,
    WINDOW: tl.constexpr, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    request = tl.load(requests_ptr + token).to(tl.int64)
    position = tl.where(request < 0, -1, position)
    oldest = tl.maximum(position - (WINDOW - 1), 0)
    lanes = tl.arange(0, BLOCK)
    rows = oldest + lanes
    slots = _slots(pages_ptr, pages_stride, num_pages, request, rows, rows <= position, PAGE_ROWS)
    tl.store(slots_ptr + token * slots_stride + lanes, slots.to(tl.int32), mask=lanes < WINDOW)
    tl.store(own_ptr + token + lanes * 0, slots, mask=rows == position)
    if position < 0:
        tl.store(own_ptr + token, tl.full((), -1, tl.int64))
    tl.store(lengths_ptr + token, tl.minimum(position + 1, WINDOW))


@triton.jit
def _plan_entries_kernel(
    positions_ptr, requests_ptr, pages_ptr, pages_stride, num_pages, visible_ptr, slots_ptr, slots_stride, num_entries,
    RATIO: tl.constexpr, ALL_ROWS: tl.constexpr, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    request = tl.load(requests_ptr + token).to(tl.int64)
    visible = tl.where(request < 0, 0, (position + 1) // RATIO)
    if tl.program_id(1) == 0:
        tl.store(visible_ptr + token, visible)
    if ALL_ROWS:
        entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slots = _slots(pages_ptr, pages_stride, num_pages, request, entries, entries < visible, PAGE_ROWS)
        tl.store(slots_ptr + token * slots_stride + entries, slots.to(tl.int32), mask=entries < num_entries)


def plan_window(
    positions_T: Tensor,
    requests_T: Tensor,
    window_pages_RP: Tensor,
    own_T: Tensor,
    slots_TW: Tensor,
    lengths_T: Tensor,
    *,
    page_rows: int,
) -> None:
    """Writes the window rows that each token sees, oldest first, and its own slot.

    Args:
        positions_T: int32 positions; -1 on padding.
        requests_T: int32 requests; -1 on padding.
        window_pages_RP: int32 pages; -1 where there is none.
        own_T: Written: int64 slot of each token's own row; -1 on padding.
        slots_TW: Written: int32 slots; -1 behind the length.
        lengths_T: Written: int32 rows seen.
        page_rows: Rows of a window page.
    """
    if positions_T.shape[0]:
        _plan_window_kernel[(positions_T.shape[0],)](
            positions_T, requests_T, window_pages_RP, window_pages_RP.stride(0), window_pages_RP.shape[1], own_T,
            slots_TW, slots_TW.stride(0), lengths_T, WINDOW=slots_TW.shape[1], PAGE_ROWS=page_rows,
            BLOCK=triton.next_power_of_2(slots_TW.shape[1]), num_warps=4,
        )  # fmt: skip


def plan_entries(
    positions_T: Tensor,
    requests_T: Tensor,
    token_pages_RP: Tensor,
    visible_T: Tensor,
    slots_TK: Tensor | None,
    *,
    ratio: int,
    page_rows: int,
) -> None:
    """Writes how many closed blocks each token sees and, if asked, their slots.

    Args:
        positions_T: int32 positions; -1 on padding.
        requests_T: int32 requests; -1 on padding.
        token_pages_RP: int32 pages; -1 where there is none.
        visible_T: Written: int32 (position + 1) // ratio; 0 on padding.
        slots_TK: Written: int32 slots of all closed blocks, -1 behind them; None leaves them out.
        ratio: Tokens of a block.
        page_rows: Compressed rows of a token page.
    """
    if positions_T.shape[0]:
        num_entries = 0 if slots_TK is None else slots_TK.shape[1]
        block = min(_ENTRIES, triton.next_power_of_2(max(num_entries, 1)))
        slots = visible_T if slots_TK is None else slots_TK
        _plan_entries_kernel[(positions_T.shape[0], max(1, triton.cdiv(num_entries, block)))](
            positions_T, requests_T, token_pages_RP, token_pages_RP.stride(0), token_pages_RP.shape[1], visible_T,
            slots, slots.stride(0), num_entries, RATIO=ratio, ALL_ROWS=slots_TK is not None, PAGE_ROWS=page_rows,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
