"""BatchBuilder: from a step's numbers to its plan. The host's half of a step; `step_tensors` is the other.

Everything a step brings is written into one host buffer (pinned where there is a device), which is uploaded, and sent
to other ranks, as a whole. Page tables stay on the device: a plan carries only the entries that changed. Tokens
sampled by the last step never visit the host either: the device takes them from a buffer by engine row.

Host buffers alternate, because the copy of the last step may still be under way when the next one is filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halocline.engine.step_plan import StepLayout, StepPlan, StepShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from halocline.engine.batch import Batch
    from halocline.engine.row_table import PageTable, RowTable

__all__ = ["BatchBuilder", "HostBuffers", "padding_plan", "step_layouts"]

_MIN_CHANGES = 256

Arrays = dict[str, "NDArray[Any]"]


def step_layouts(num_rows: int, max_step_tokens: int, page_units: Sequence[int]) -> tuple[StepLayout, StepLayout]:
    """Layouts of steps that only decode, and of steps with prefill.

    Decode steps have buffers of their own, so that their plan and their graphs stay small.

    Args:
        num_rows: Engine rows.
        max_step_tokens: Tokens of a step.
        page_units: Positions of a column in each page table.
    """
    changes = max(_MIN_CHANGES, 4 * num_rows)
    decode = StepLayout(num_rows, num_rows, changes)
    return decode, StepLayout(max_step_tokens, num_rows, changes + 2 * (max_step_tokens // min(page_units)))


class HostBuffers:
    """Two host buffers of one layout, filled in turn.

    Attributes:
        layout: Of both.
        max_changes: Page table entries that one plan carries, of each table.
    """

    def __init__(self, layout: StepLayout, *, pin: bool) -> None:
        self.layout = layout
        self.max_changes = layout.max_changes
        self._packed = [torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._arrays = [{n: view.numpy() for n, view in layout.views(packed).items()} for packed in self._packed]
        self._short = [packed[: layout.nbytes_without_changes] for packed in self._packed]
        self._turn = 0

    def next_arrays(self) -> Arrays:
        """The arrays to fill for the next plan."""
        self._turn ^= 1
        return self._arrays[self._turn]

    def packed(self, *, with_changes: bool) -> Tensor:
        """What was filled last."""
        return (self._packed if with_changes else self._short)[self._turn]


class BatchBuilder:
    """Builds the plans of one attention group's steps.

    Attributes:
        decode: Buffers of steps that only decode.
        mixed: Buffers of steps with prefill.
    """

    def __init__(self, table: RowTable, *, max_step_tokens: int, max_positions: int, pin: bool = False) -> None:
        rows = table.num_rows
        self._table = table
        self._max_positions = max_positions
        self._range = np.arange(rows + 1, dtype=np.int32)
        decode, mixed = step_layouts(rows, max_step_tokens, (table.window.unit, table.tokens.unit))
        self.decode = HostBuffers(decode, pin=pin)
        self.mixed = HostBuffers(mixed, pin=pin)

    def plans(self, batch: Batch, shape: StepShape, scored: tuple[tuple[int, int], ...] = ()) -> Iterator[StepPlan]:
        """The plan of a step, behind plans for the changes of page tables that do not fit into it.

        A plan has to be uploaded, or copied, before the next one is asked for.

        Args:
            batch: The step of this group; it may bring nothing where other groups bring something.
            shape: What was decided for all groups.
            scored: First hidden row and number of rows of each round of `shape.scored`.
        """
        buffers = self.mixed if shape.mixed else self.decode
        window, tokens = self._table.window.take_changes(), self._table.tokens.take_changes()
        limit = buffers.max_changes
        while True:
            arrays = buffers.next_arrays()
            counts = (
                _stage(self._table.window, window[:limit], arrays["window_cells"], arrays["window_values"]),
                _stage(self._table.tokens, tokens[:limit], arrays["token_cells"], arrays["token_values"]),
            )
            window, tokens = window[limit:], tokens[limit:]
            if len(window) == 0 and len(tokens) == 0:
                break
            yield _changes_only(buffers, counts, mixed=shape.mixed)
        max_seqlen = self._fill(batch, arrays)
        num_requests, num_decode = self._pad(batch, shape, arrays)
        yield StepPlan(
            shape=shape,
            packed=buffers.packed(with_changes=counts[0] > 0 or counts[1] > 0),
            num_requests=num_requests,
            num_decode=num_decode,
            num_sampled=len(batch.sampled_rows),
            max_seqlen=max_seqlen,
            window_changes=counts[0],
            token_changes=counts[1],
            scored=scored,
            copies=tuple(batch.copies),
            restores=tuple(batch.restores),
        )

    def _fill(self, batch: Batch, arrays: Arrays) -> int:
        """Writes the step's numbers; returns the longest sequence after it."""
        table, rows, count = self._table, batch.decode_rows, len(batch.decode_rows)
        longest = 1
        arrays["query_starts"][: count + 1] = self._range[: count + 1]
        if count:
            positions = table.computed[rows]
            longest = int(positions.max()) + 1
            arrays["rows"][:count] = arrays["sampled_rows"][:count] = rows
            arrays["positions"][:count] = positions
            arrays["seqlens"][:count] = positions + 1
            arrays["state_slots"][:count] = table.state_slots[rows]
            arrays["token_requests"][:count] = arrays["sampled_tokens"][:count] = self._range[:count]
        token, sampled = count, count
        for index, chunk in enumerate(batch.chunks, count):
            stop = token + chunk.end - chunk.start
            arrays["rows"][index] = chunk.row
            arrays["positions"][token:stop] = np.arange(chunk.start, chunk.end, dtype=np.int32)
            arrays["token_ids"][token:stop] = chunk.request.span(chunk.start, chunk.end)
            arrays["token_requests"][token:stop] = index
            arrays["query_starts"][index + 1] = stop
            arrays["seqlens"][index] = chunk.end
            arrays["state_slots"][index] = table.state_slots[chunk.row]
            longest = max(longest, chunk.end)
            if chunk.samples:
                arrays["sampled_rows"][sampled] = chunk.row
                arrays["sampled_tokens"][sampled] = stop - 1
                sampled += 1
            token = stop
        return longest

    def _pad(self, batch: Batch, shape: StepShape, arrays: Arrays) -> tuple[int, int]:
        """Adds padding up to the shape; returns requests and requests that decode, padding included.

        In a step that only decodes, padding comes as requests of one token. In others it is tokens of no request.
        """
        num_requests, num_decode = batch.num_requests, len(batch.decode_requests)
        if shape.sampled > len(batch.sampled_rows):
            arrays["sampled_tokens"][len(batch.sampled_rows) : shape.sampled] = 0  # any hidden row will do
        if shape.num_tokens == batch.num_tokens:
            return num_requests, num_decode
        if not shape.mixed:
            _pad_requests(arrays, num_requests, shape.num_tokens, self._table.num_rows, batch.num_tokens)
            _pad_tokens(arrays, batch.num_tokens, shape.num_tokens)
            return shape.num_tokens, shape.num_tokens
        _pad_tokens(arrays, batch.num_tokens, shape.num_tokens)
        arrays["token_ids"][batch.num_tokens : shape.num_tokens] = 0
        if num_requests == 0:
            _pad_requests(arrays, 0, 1, self._table.num_rows, 0)
            return 1, 0
        return num_requests, num_decode


def padding_plan(
    layout: StepLayout,
    *,
    mixed: bool,
    num_tokens: int,
    num_requests: int,
    max_seqlen: int,
    num_decode: int | None = None,
) -> StepPlan:
    """A step that holds nothing but padding, for plans at capacity, for warm-up and for capture.

    Args:
        layout: Of the buffers; as many rows as requests fit.
        mixed: Whether they are those of steps with prefill.
        num_tokens: Tokens.
        num_requests: Requests; those that decode bring one token each.
        max_seqlen: Longest sequence that is claimed.
        num_decode: Requests that decode: all of a step that only decodes, else none, unless told.
    """
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    arrays = {name: view.numpy() for name, view in layout.views(packed).items()}
    _pad_requests(arrays, 0, layout.max_requests, layout.max_requests, 0)
    _pad_tokens(arrays, 0, layout.max_tokens)
    return StepPlan(
        shape=StepShape(mixed=mixed, num_tokens=num_tokens, sampled=0),
        packed=packed[: layout.nbytes_without_changes],
        num_requests=num_requests,
        num_decode=(0 if mixed else num_requests) if num_decode is None else num_decode,
        num_sampled=0,
        max_seqlen=max_seqlen,
    )


def _stage(table: PageTable, changed: NDArray[np.int64], cells: NDArray[np.int64], values: NDArray[np.int32]) -> int:
    """Writes changes into a plan. A cell that is named twice carries its last value twice."""
    count = len(changed)
    if count:
        cells[:count] = changed
        values[:count] = table.pages.reshape(-1)[changed]
    return count


def _changes_only(buffers: HostBuffers, counts: tuple[int, int], *, mixed: bool) -> StepPlan:
    return StepPlan(
        shape=StepShape(mixed=mixed, num_tokens=0, sampled=0),
        packed=buffers.packed(with_changes=True),
        num_requests=0,
        num_decode=0,
        num_sampled=0,
        max_seqlen=0,
        window_changes=counts[0],
        token_changes=counts[1],
    )


def _pad_requests(arrays: Arrays, start: int, stop: int, empty_row: int, num_tokens: int) -> None:
    arrays["rows"][start:stop] = empty_row
    arrays["seqlens"][start:stop] = 0
    arrays["state_slots"][start:stop] = -1
    arrays["query_starts"][start + 1 : stop + 1] = num_tokens


def _pad_tokens(arrays: Arrays, start: int, stop: int) -> None:
    arrays["positions"][start:stop] = arrays["token_requests"][start:stop] = -1
