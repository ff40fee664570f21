"""RowTable: what the engine keeps of each running request, indexed by engine row.

A row belongs to a request from admission to its end or preemption, so nothing is rebuilt from step to step. What every
step needs of every row lies in numpy arrays and takes a few operations, whatever the batch; what changes once in a
page lies in lists. Page tables remember which entries changed; the batch builder sends only those to the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self._changed: list[int] = []

    @property
    def num_columns(self) -> int:
        """Columns of a row."""
        return int(self.pages.shape[1])

    def set(self, row: int, column: int, page: int) -> None:
        """Writes one page."""
        self.pages[row, column] = page
        self._changed.append(row * self.pages.shape[1] + column)

    def set_span(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Writes pages from a column on."""
        stop = start + len(pages)
        self.pages[row, start:stop] = pages
        self._note_span(row, start, stop)

    def clear_span(self, row: int, start: int, stop: int) -> list[int]:
        """Empties columns and returns the pages that were there."""
        found: list[int] = self.pages[row, start:stop].tolist()
        self.pages[row, start:stop] = -1
        self._note_span(row, start, stop)
        return found

    def take_changes(self) -> NDArray[np.int64]:
        """Flat indices of the cells written since the last call; a cell may be named twice."""
        changed = np.array(self._changed, dtype=np.int64)
        self._changed.clear()
        return changed

    def _note_span(self, row: int, start: int, stop: int) -> None:
        base = row * self.num_columns
        self._changed.extend(range(base + start, base + stop))


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
        self.window_start = [0] * num_rows
        self.window_end = [0] * num_rows
        self.token_end = [0] * num_rows
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
        self.window_start[row] = self.window_end[row] = self.token_end[row] = 0
        self.next_change[row] = 0
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
