"""BatchBuilder: from a step's numbers to `BatchMetadata` in persistent buffers, with one upload.

Everything a step brings lies in one host buffer (pinned where there is a device) that is copied as a whole to one
device buffer at a fixed address; the tensors of a step are views of it. Page tables stay on the device: the upload
carries only the entries that changed, and the rows of a step are gathered there. Tokens sampled by the last step never
visit the host either: they are taken from a device buffer by engine row.

Host buffers alternate, because the copy of the last step may still be under way when the next one is filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halocline.hal.ops.batch import BatchMetadata

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from halocline.engine.batch import Batch
    from halocline.engine.row_table import PageTable, RowTable

__all__ = ["BatchBuilder", "DeviceTable", "StepBuffers"]

_MIN_CHANGES = 256


class _Section:
    """Offset and length of one array in a step buffer, in bytes."""

    def __init__(self, offset: int, length: int, dtype: torch.dtype) -> None:
        self.length = length
        self.dtype = dtype
        self.start = offset
        self.stop = offset + length * dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.dtype)


class StepBuffers:
    """The arrays of a step at capacity: two host buffers, one device buffer.

    Attributes:
        max_tokens: Tokens that fit.
        max_requests: Requests that fit.
        max_changes: Page table entries that one upload carries, of each table.
        tensors: Device views by name.
    """

    def __init__(self, max_tokens: int, max_requests: int, max_changes: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.max_changes = max_changes
        long, int32 = torch.int64, torch.int32
        sizes = {
            "rows": (max_requests, long),
            "sampled_rows": (max_requests, long),
            "sampled_tokens": (max_requests, long),
            "window_cells": (max_changes, long),
            "token_cells": (max_changes, long),
            "window_values": (max_changes, int32),
            "token_values": (max_changes, int32),
            "query_starts": (max_requests + 1, int32),
            "seqlens": (max_requests, int32),
            "state_slots": (max_requests, int32),
            "token_ids": (max_tokens, int32),
            "positions": (max_tokens, int32),
            "token_requests": (max_tokens, int32),
        }
        sections: dict[str, _Section] = {}
        offset = 0
        for name, (length, dtype) in sizes.items():
            sections[name] = _Section(offset, length, dtype)
            offset = -(-sections[name].stop // 8) * 8
        pin = device.type != "cpu"
        self._host = [torch.zeros(offset, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._device = torch.zeros(offset, dtype=torch.uint8, device=device)
        self._arrays = [{n: s.view(host).numpy() for n, s in sections.items()} for host in self._host]
        self._turn = 0
        self.tensors = {name: section.view(self._device) for name, section in sections.items()}

    def next_arrays(self) -> dict[str, NDArray[Any]]:
        """The host arrays to fill for the next upload."""
        self._turn ^= 1
        return self._arrays[self._turn]

    def upload(self, *, wait: bool = False) -> None:
        """Copies the host buffer that was filled last; with `wait` it may be filled again at once."""
        self._device.copy_(self._host[self._turn], non_blocking=not wait)


class DeviceTable:
    """A page table on the device: all engine rows, and the rows of a step in the order of the step.

    The step's table keeps its row stride at capacity, and columns that nobody uses are -1 in every row. The row behind
    the last engine row is empty; padding reads it.
    """

    def __init__(self, host: PageTable, max_requests: int, device: torch.device) -> None:
        num_rows, num_columns = host.pages.shape
        self._host = host
        self._all = torch.full((num_rows + 1, num_columns), -1, dtype=torch.int32, device=device)
        self._flat = self._all.view(-1)
        self.step_pages = torch.full((max_requests, num_columns), -1, dtype=torch.int32, device=device)
        self._used = 0

    def stage(self, cells: NDArray[np.int64], values: NDArray[np.int32], changed: NDArray[np.int64]) -> int:
        """Writes changes into the arrays of an upload. A cell that is named twice carries its last value twice."""
        count = len(changed)
        cells[:count] = changed
        values[:count] = self._host.pages.reshape(-1)[changed]
        return count

    def apply(self, cells: Tensor, values: Tensor, count: int) -> None:
        """Applies uploaded changes."""
        if count:
            self._flat.index_copy_(0, cells[:count], values[:count])

    def resync(self) -> None:
        """Copies the whole table, after a step that failed on its way to the device."""
        self._host.take_changes()
        self._all[:-1].copy_(torch.from_numpy(self._host.pages))

    def gather(self, rows: Tensor, count: int, num_positions: int) -> None:
        """Fills the first rows of the step's table, in all columns that were or will be used."""
        columns = -(-num_positions // self._host.unit)
        width = min(max(columns, self._used), self._host.num_columns)
        self._used = columns
        if count and width:
            torch.index_select(self._all[:, :width], 0, rows[:count], out=self.step_pages[:count, :width])


class BatchBuilder:
    """Builds the tensors of steps.

    Attributes:
        last_ids: int32 token that each engine row sampled last, on the device; one row more for padding.
        decode: Buffers of steps that only decode.
        mixed: Buffers of steps with prefill.
    """

    def __init__(self, table: RowTable, *, max_step_tokens: int, max_positions: int, device: torch.device) -> None:
        rows = table.num_rows
        self._table = table
        self._max_positions = max_positions
        self._window = DeviceTable(table.window, rows, device)
        self._tokens = DeviceTable(table.tokens, rows, device)
        self._range = np.arange(rows + 1, dtype=np.int32)
        self._decode_views: dict[tuple[int, int], BatchMetadata] = {}
        self.last_ids = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        changes = max(_MIN_CHANGES, 4 * rows)
        self.decode = StepBuffers(rows, rows, changes, device)
        changes += 2 * (max_step_tokens // min(table.window.unit, table.tokens.unit))
        self.mixed = StepBuffers(max_step_tokens, rows, changes, device)

    def build(self, batch: Batch, *, padded: int | None = None) -> BatchMetadata:
        """Fills, uploads and returns the tensors of a step.

        Args:
            batch: The step.
            padded: For a decode step under a captured graph, the number of requests that the graph was captured for.

        Returns:
            Views that stay valid until the next step. Rows behind the counts, up to `padded`, are padding.
        """
        buffers = self._buffers_of(batch)
        arrays, num_changes = self._stage_changes(buffers)
        max_seqlen = self._fill(batch, arrays)
        num_requests = padded or batch.num_requests
        self._pad(arrays, batch.num_requests, num_requests, batch.num_tokens)
        buffers.upload()
        self._apply_changes(buffers, num_changes)
        tensors = buffers.tensors
        self._window.gather(tensors["rows"], num_requests, max_seqlen)
        self._tokens.gather(tensors["rows"], num_requests, max_seqlen)
        num_decode = padded or len(batch.decode_requests)
        if num_decode:
            ids = tensors["token_ids"][:num_decode]
            torch.index_select(self.last_ids, 0, tensors["rows"][:num_decode], out=ids)
            ids.clamp_(min=0)  # a row whose logits were NaN: its request ends when this is read
        metadata = self._views(buffers, padded or batch.num_tokens, num_requests)
        metadata.num_decode_tokens = metadata.num_decode_requests = num_decode
        metadata.max_seqlen = self._max_positions if padded else max_seqlen
        return metadata

    def padding(self, buffers: StepBuffers, num_tokens: int, num_requests: int) -> BatchMetadata:
        """Tensors of a step that holds nothing but padding, for plans at capacity and for capture."""
        arrays = buffers.next_arrays()
        arrays["query_starts"][0] = 0
        self._pad(arrays, 0, buffers.max_requests, 0)
        for name in ("positions", "token_requests"):
            arrays[name][:] = -1
        arrays["token_ids"][:] = 0
        buffers.upload(wait=True)
        for table in (self._window, self._tokens):
            table.gather(buffers.tensors["rows"], buffers.max_requests, self._max_positions)
        metadata = self._views(buffers, num_tokens, num_requests)
        metadata.num_decode_tokens = metadata.num_decode_requests = num_requests if buffers is self.decode else 0
        metadata.max_seqlen = self._max_positions
        return metadata

    def sampled_tokens(self, batch: Batch) -> Tensor:
        """Index in the step of each token whose logits are wanted."""
        return self._buffers_of(batch).tensors["sampled_tokens"][: len(batch.sampled_rows)]

    def keep_ids(self, batch: Batch, ids_R: Tensor) -> None:
        """Stores the sampled tokens for the next step."""
        rows = self._buffers_of(batch).tensors["sampled_rows"][: len(batch.sampled_rows)]
        self.last_ids.index_copy_(0, rows, ids_R)

    def resync(self) -> None:
        """Copies all page tables again, after a step that failed on its way to the device."""
        self._window.resync()
        self._tokens.resync()

    def _buffers_of(self, batch: Batch) -> StepBuffers:
        """Decode steps have buffers of their own, so that their plan and their graphs stay small."""
        return self.mixed if batch.chunks else self.decode

    # ---- page tables --------------------------------------------------------------------------------------------

    def _stage_changes(self, buffers: StepBuffers) -> tuple[dict[str, NDArray[Any]], tuple[int, int]]:
        """Puts what changed in the page tables into the next upload; what exceeds it goes in uploads before it."""
        window, tokens = self._table.window.take_changes(), self._table.tokens.take_changes()
        limit = buffers.max_changes
        while True:
            arrays = buffers.next_arrays()
            counts = (
                self._window.stage(arrays["window_cells"], arrays["window_values"], window[:limit]),
                self._tokens.stage(arrays["token_cells"], arrays["token_values"], tokens[:limit]),
            )
            window, tokens = window[limit:], tokens[limit:]
            if len(window) == 0 and len(tokens) == 0:
                return arrays, counts
            buffers.upload(wait=True)
            self._apply_changes(buffers, counts)

    def _apply_changes(self, buffers: StepBuffers, counts: tuple[int, int]) -> None:
        tensors = buffers.tensors
        self._window.apply(tensors["window_cells"], tensors["window_values"], counts[0])
        self._tokens.apply(tensors["token_cells"], tensors["token_values"], counts[1])

    # ---- arrays of a step ---------------------------------------------------------------------------------------

    def _fill(self, batch: Batch, arrays: dict[str, NDArray[Any]]) -> int:
        """Writes the step's numbers; returns the longest sequence after it."""
        table, rows, count = self._table, batch.decode_rows, len(batch.decode_rows)
        longest = 0
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

    def _pad(self, arrays: dict[str, NDArray[Any]], start: int, stop: int, num_tokens: int) -> None:
        """Turns the requests start to stop - 1, and as many tokens behind `num_tokens`, into padding."""
        if stop <= start:
            return
        arrays["rows"][start:stop] = self._table.num_rows
        arrays["seqlens"][start:stop] = 0
        arrays["state_slots"][start:stop] = -1
        arrays["query_starts"][start + 1 : stop + 1] = num_tokens
        end = num_tokens + stop - start
        arrays["positions"][num_tokens:end] = arrays["token_requests"][num_tokens:end] = -1

    def _views(self, buffers: StepBuffers, num_tokens: int, num_requests: int) -> BatchMetadata:
        """Views of the first rows; those of decode steps are made once for each count."""
        key = (num_tokens, num_requests)
        kept = buffers is self.decode
        found = self._decode_views.get(key) if kept else None
        if found is None:
            tensors = buffers.tensors
            found = BatchMetadata(
                token_ids_T=tensors["token_ids"][:num_tokens],
                positions_T=tensors["positions"][:num_tokens],
                token_requests_T=tensors["token_requests"][:num_tokens],
                query_starts_R1=tensors["query_starts"][: num_requests + 1],
                seqlens_R=tensors["seqlens"][:num_requests],
                state_slots_R=tensors["state_slots"][:num_requests],
                window_pages_RP=self._window.step_pages[:num_requests],
                token_pages_RP=self._tokens.step_pages[:num_requests],
                num_tokens=num_tokens,
                num_requests=num_requests,
                num_decode_tokens=0,
                num_decode_requests=0,
                max_seqlen=0,
            )
            if kept:
                self._decode_views[key] = found
        return found
