"""RowTable: what the engine keeps of each running request, as numpy arrays indexed by engine row.

A row belongs to a request from admission to its end or preemption, so nothing is rebuilt from step to step and the
work of a decode step is a few array operations, whatever the batch. Page tables remember which entries changed; the
batch builder sends only those to the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from halocline.engine.request import Request
    from halocline.hal.ops.batch import CacheGeometry

__all__ = ["PageTable", "RowTable"]


class PageTable:
    """Pages of each row by position, and where they changed.

    Attributes:
        pages: int32 (rows, columns); -1 where there is no page.
        unit: Positions of a column.
    """

    def __init__(self, num_rows: int, max_positions: int, unit: int) -> None:
        self.unit = unit
        self.pages: NDArray[np.int32] = np.full((num_rows, -(-max_positions // unit)), -1, dtype=np.int32)
        self._changed: list[NDArray[np.int64]] = []

    @property
    def num_columns(self) -> int:
        """Columns of a row."""
        return int(self.pages.shape[1])

    def set_span(self, row: int, start: int, pages: list[int] | int) -> None:
        """Writes pages (or one number) from a column on."""
        stop = start + (len(pages) if isinstance(pages, list) else 1)
        self.pages[row, start:stop] = pages
        self._note_span(row, start, stop)

    def clear_span(self, row: int, start: int, stop: int) -> list[int]:
        """Empties columns and returns the pages that were there."""
        found: list[int] = self.pages[row, start:stop].tolist()
        self.pages[row, start:stop] = -1
        self._note_span(row, start, stop)
        return [page for page in found if page >= 0]

    def set_cells(self, rows: NDArray[np.int32], columns: NDArray[np.int32], pages: list[int] | int) -> None:
        """Writes one cell in each of several rows."""
        self.pages[rows, columns] = pages
        self._changed.append(rows.astype(np.int64) * self.num_columns + columns)

    def take_changes(self) -> NDArray[np.int64]:
        """Flat indices of the cells written since the last call; a cell may be named twice."""
        if not self._changed:
            return np.empty(0, dtype=np.int64)
        changed = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed.clear()
        return changed

    def _note_span(self, row: int, start: int, stop: int) -> None:
        if stop > start:
            base = row * self.num_columns
            self._changed.append(np.arange(base + start, base + stop, dtype=np.int64))


class RowTable:
    """Rows 0 to `num_rows` - 1.

    Attributes:
        requests: Request of each row, or None.
        computed: Tokens fed in all steps that were launched.
        generated: Tokens sampled, those in flight included.
        max_tokens: Tokens to generate at most.
        state_slots: State slot; -1 on a free row.
        window_start: First window column that is still held.
        window_end: First window column that is not there yet.
        token_end: First token column that is not there yet.
        next_change: Position from which a decode step has to add or free a page of the row.
        window: Window pages.
        tokens: Token pages.
    """

    def __init__(self, num_rows: int, max_positions: int, geometry: CacheGeometry) -> None:
        self.num_rows = num_rows
        self.requests: list[Request | None] = [None] * num_rows
        self.computed = _zeros(num_rows)
        self.generated = _zeros(num_rows)
        self.max_tokens = _zeros(num_rows)
        self.state_slots = _zeros(num_rows) - 1
        self.window_start = _zeros(num_rows)
        self.window_end = _zeros(num_rows)
        self.token_end = _zeros(num_rows)
        self.next_change = _zeros(num_rows)
        self.window = PageTable(num_rows, max_positions, geometry.window_page_rows)
        self.tokens = PageTable(num_rows, max_positions, geometry.page_tokens)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows without a request."""
        return len(self._free)

    def open(self, request: Request) -> int:
        """Gives the request a row."""
        row = self._free.pop()
        self.requests[row] = request
        self.computed[row] = 0
        self.generated[row] = len(request.output_ids)
        self.max_tokens[row] = request.admitted.max_tokens
        self.window_start[row] = self.window_end[row] = self.token_end[row] = self.next_change[row] = 0
        request.row = row
        return row

    def close(self, row: int) -> None:
        """Frees a row whose pages and slot are gone."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free already"
        request.row = -1
        self.requests[row] = None
        self.state_slots[row] = -1
        self._free.append(row)


def _zeros(count: int) -> NDArray[np.int32]:
    return np.zeros(count, dtype=np.int32)
