"""Row selections of a step from its positions and page tables. T tokens, K entries, R requests, P pages.

One program serves one token, or some entries of one. A row that does not exist (padding, a page that is not there)
gets slot -1.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["plan_blocks", "plan_window"]

_BLOCK = 256  # entries of a program


@triton.jit
def _slots(units, valid, pages_ptr, row, UNIT: tl.constexpr):
    """int32 slots of row numbers of a request whose page table begins at `pages_ptr + row`."""
    page = tl.load(pages_ptr + row + units // UNIT, mask=valid, other=-1)
    return tl.where(page >= 0, page * UNIT + units % UNIT, -1)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "requests_ptr"])
def _plan_window_kernel(
    positions_ptr, requests_ptr, pages_ptr, pages_stride, slots_ptr, slots_stride, lengths_ptr, own_ptr,
    WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    request = tl.load(requests_ptr + token).to(tl.int64)
    last = tl.where(request >= 0, position, -1)
    place = tl.arange(0, WINDOW_BLOCK)
    seen = tl.maximum(position - (WINDOW - 1), 0) + place
    row = tl.maximum(request, 0) * pages_stride
    slots = _slots(seen, (seen <= last) & (place < WINDOW), pages_ptr, row, UNIT)
    tl.store(slots_ptr + token * slots_stride + place, slots, mask=place < WINDOW)
    tl.store(lengths_ptr + token, tl.minimum(tl.maximum(position + 1, 0), WINDOW))
    own = tl.max(tl.where((seen == position) & (place < WINDOW), slots, -1), axis=0)
    tl.store(own_ptr + token, own.to(tl.int64))


@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["positions_ptr", "requests_ptr"])
def _plan_blocks_kernel(
    positions_ptr, requests_ptr, pages_ptr, pages_stride, slots_ptr, slots_stride, visible_ptr, num_entries,
    RATIO: tl.constexpr, LISTED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    visible = (position + 1) // RATIO
    tl.store(visible_ptr + token, visible, mask=tl.program_id(1) == 0)
    if LISTED:
        request = tl.load(requests_ptr + token).to(tl.int64)
        row = tl.maximum(request, 0) * pages_stride
        listed = tl.where(request >= 0, visible, 0)
        entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slots = _slots(entries, entries < listed, pages_ptr, row, UNIT)
        tl.store(slots_ptr + token * slots_stride + entries, slots, mask=entries < num_entries)


def plan_window(
    positions_T: Tensor,
    requests_T: Tensor,
    pages_RP: Tensor,
    *,
    page_rows: int,
    slots_TK: Tensor,
    lengths_T: Tensor,
    own_T: Tensor,
) -> None:
    """Writes the window rows of each token, oldest first, and the slot of its own row.

    Args:
        positions_T: int32 positions; -1 on padding.
        requests_T: int32 request of each token; -1 on padding.
        pages_RP: int32 window pages; -1 where there is none.
        page_rows: Rows of a page.
        slots_TK: Written: int32, as wide as the window, entries contiguous.
        lengths_T: Written: int32.
        own_T: Written: int64.
    """
    window = slots_TK.shape[1]
    if positions_T.shape[0]:
        _plan_window_kernel[(positions_T.shape[0],)](
            positions_T, requests_T, pages_RP, pages_RP.stride(0), slots_TK, slots_TK.stride(0), lengths_T, own_T,
            WINDOW=window, WINDOW_BLOCK=triton.next_power_of_2(window), UNIT=page_rows, num_warps=1,
        )  # fmt: skip


def plan_blocks(
    positions_T: Tensor,
    requests_T: Tensor,
    pages_RP: Tensor,
    *,
    ratio: int,
    page_rows: int,
    visible_T: Tensor,
    slots_TK: Tensor | None,
) -> None:
    """Writes how many closed blocks each token sees and, if asked, the slots of all of them.

    Args:
        positions_T: int32 positions; -1 on padding.
        requests_T: int32 request of each token; -1 on padding.
        pages_RP: int32 token pages; -1 where there is none.
        ratio: Tokens of a block.
        page_rows: Rows of a page.
        visible_T: Written: int32.
        slots_TK: Written: int32, entries contiguous, -1 behind the visible ones; None where nobody lists all blocks.
    """
    listed = slots_TK is not None
    slots = visible_T[:, None] if slots_TK is None else slots_TK
    if positions_T.shape[0]:
        _plan_blocks_kernel[(positions_T.shape[0], triton.cdiv(slots.shape[1], _BLOCK))](
            positions_T, requests_T, pages_RP, pages_RP.stride(0), slots, slots.stride(0), visible_T, slots.shape[1],
            RATIO=ratio, LISTED=listed, UNIT=page_rows, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
