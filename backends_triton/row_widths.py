"""Widths of row selections: kernels want multiples of 64 or 128, or one width for all steps. T tokens, K entries.

Entries at and behind a row's length are ignored, so a selection that is a view of a wider buffer may be widened to
what lies behind it without a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.ops.attention import RowSelection

__all__ = ["padded_rows", "whole_rows"]

_ALIGNED = 4  # entries that kernels of libraries load at once: 16 bytes


def _room(rows: RowSelection) -> int:
    """Entries of a row that can be reached without running into the next one or out of the buffer."""
    slots_TK = rows.slots_TK
    num_tokens, width = slots_TK.shape
    if slots_TK.stride(1) != 1 or not num_tokens or slots_TK.stride(0) <= width:
        return width
    stride = slots_TK.stride(0)
    last = int(slots_TK.storage_offset()) + (num_tokens - 1) * stride
    return min(stride, slots_TK.untyped_storage().nbytes() // slots_TK.element_size() - last)


def _is_aligned(slots_TK: Tensor) -> bool:
    """Whether every row begins where several of its entries can be loaded at once."""
    strides = (int(slots_TK.storage_offset()), slots_TK.stride(0))
    return slots_TK.stride(1) == 1 and not any(stride % _ALIGNED for stride in strides)


def _widened(rows: RowSelection, width: int) -> RowSelection:
    slots_TK = rows.slots_TK
    return RowSelection(slots_TK.as_strided((slots_TK.shape[0], width), (slots_TK.stride(0), 1)), rows.lengths_T)


def whole_rows(rows: RowSelection) -> RowSelection:
    """A selection as wide as its buffer: its width is then the same in every step, and so is the kernel."""
    room = _room(rows)
    return _widened(rows, room) if room > rows.slots_TK.shape[1] else rows


def padded_rows(rows: RowSelection, multiple: int) -> RowSelection:
    """A selection whose width is a multiple, at least one, and whose rows begin at multiples of 16 bytes.

    A copy is made only where the buffer is too narrow or its rows begin elsewhere.
    """
    num_tokens, width = rows.slots_TK.shape
    wanted = max(-(-width // multiple), 1) * multiple
    if width == wanted and _is_aligned(rows.slots_TK):
        return rows
    if _room(rows) >= wanted and _is_aligned(rows.slots_TK):
        return _widened(rows, wanted)
    slots_TK = torch.full((num_tokens, wanted), -1, dtype=torch.int32, device=rows.slots_TK.device)
    slots_TK[:, :width] = rows.slots_TK
    return RowSelection(slots_TK, rows.lengths_T)
