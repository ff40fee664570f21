"""StepTensors: from a plan to `BatchMetadata`, with one upload. The half of a step that every rank does for itself.

The tensors of a step are views of one device buffer at a fixed address. Page tables stay on the device: an upload
brings the entries that changed, and the rows of a step are gathered there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halocline.engine.batch_builder import padding_plan, step_layouts
from halocline.hal.ops.batch import BatchMetadata

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from halocline.engine.row_table import PageTable, RowTable
    from halocline.engine.step_plan import StepLayout, StepPlan

__all__ = ["DeviceBuffers", "DeviceTable", "StepTensors"]


class DeviceBuffers:
    """The device's copy of a step's packed numbers.

    Attributes:
        layout: Where the arrays lie.
        tensors: Device views by name.
    """

    def __init__(self, layout: StepLayout, device: torch.device) -> None:
        self.layout = layout
        self._packed = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        self._unchanged = self._packed[: layout.nbytes_without_changes]
        self.tensors = layout.views(self._packed)

    def upload(self, plan: StepPlan, *, wait: bool) -> None:
        """Copies the numbers of a plan; with `wait` their buffer may be filled again at once."""
        target = self._packed if plan.has_changes else self._unchanged
        target.copy_(plan.packed, non_blocking=not wait)


class DeviceTable:
    """A page table on the device: all engine rows, and the rows of a step in the order of the step.

    The step's table keeps its row stride at capacity, and columns that nobody uses are -1 in every row. The row behind
    the last engine row is empty; padding reads it.
    """

    def __init__(self, num_rows: int, num_columns: int, unit: int, device: torch.device) -> None:
        self._unit = unit
        self._num_columns = num_columns
        self._all = torch.full((num_rows + 1, num_columns), -1, dtype=torch.int32, device=device)
        self._flat = self._all.view(-1)
        self.step_pages = torch.full((num_rows, num_columns), -1, dtype=torch.int32, device=device)
        self._used = 0

    def apply(self, cells: Tensor, values: Tensor, count: int) -> None:
        """Applies uploaded changes."""
        if count:
            self._flat.index_copy_(0, cells[:count], values[:count])

    def replace(self, pages: NDArray[np.int32]) -> None:
        """Copies a whole table of the host."""
        self._all[:-1].copy_(torch.from_numpy(pages))

    def gather(self, rows: Tensor, count: int, num_positions: int) -> None:
        """Fills the first rows of the step's table, in all columns that were or will be used."""
        columns = -(-num_positions // self._unit)
        width = min(max(columns, self._used), self._num_columns)
        self._used = columns
        if count and width:
            torch.index_select(self._all[:, :width], 0, rows[:count], out=self.step_pages[:count, :width])


class StepTensors:
    """The tensors of one attention group's steps, on one rank.

    Attributes:
        last_ids: int32 token that each engine row sampled last, on the device; one row more for padding.
        decode: Buffers of steps that only decode.
        mixed: Buffers of steps with prefill.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_positions: int,
        max_step_tokens: int,
        window_unit: int,
        token_unit: int,
        device: torch.device,
    ) -> None:
        """Allocates everything.

        Args:
            num_rows: Engine rows.
            max_positions: Longest context.
            max_step_tokens: Tokens of a step.
            window_unit: Positions of a window page.
            token_unit: Positions of a token page.
            device: Where the model runs.
        """
        self._max_positions = max_positions
        self._tables = [
            DeviceTable(num_rows, -(-max_positions // unit), unit, device) for unit in (window_unit, token_unit)
        ]
        self._decode_views: dict[tuple[int, int], BatchMetadata] = {}
        self.last_ids = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        decode, mixed = step_layouts(num_rows, max_step_tokens, (window_unit, token_unit))
        self.decode = DeviceBuffers(decode, device)
        self.mixed = DeviceBuffers(mixed, device)

    def apply(self, plan: StepPlan, *, wait: bool = False) -> BatchMetadata:
        """Uploads a plan and gathers what it names.

        Returns:
            Views that stay valid until the next step. Rows behind the counts of real tokens are padding.
        """
        buffers, shape = self._buffers_of(plan), plan.shape
        self._upload(buffers, plan, wait=wait)
        tensors = buffers.tensors
        for table in self._tables:
            table.gather(tensors["rows"], plan.num_requests, plan.max_seqlen)
        if plan.num_decode:
            ids = tensors["token_ids"][: plan.num_decode]
            torch.index_select(self.last_ids, 0, tensors["rows"][: plan.num_decode], out=ids)
            ids.clamp_(min=0)  # a row whose logits were NaN: its request ends when this is read
        metadata = self._views(buffers, shape.num_tokens, plan.num_requests)
        metadata.num_decode_tokens = metadata.num_decode_requests = plan.num_decode
        metadata.max_seqlen = self._max_positions if shape.graph_size else plan.max_seqlen
        return metadata

    def apply_changes(self, plan: StepPlan) -> None:
        """Uploads a plan that holds nothing but changes of page tables."""
        self._upload(self._buffers_of(plan), plan, wait=True)

    def padding(
        self,
        buffers: DeviceBuffers,
        num_tokens: int,
        num_requests: int,
        *,
        num_decode: int | None = None,
        max_seqlen: int | None = None,
    ) -> BatchMetadata:
        """Tensors of a step that holds nothing but padding, for plans at capacity, for warm-up and for capture.

        Args:
            buffers: Those of steps that only decode, or with prefill.
            num_tokens: Tokens.
            num_requests: Requests.
            num_decode: Requests that decode. All of a step that only decodes, else none, unless told.
            max_seqlen: Longest sequence that is claimed; the longest context unless told.
        """
        plan = padding_plan(
            buffers.layout,
            mixed=buffers is self.mixed,
            num_tokens=num_tokens,
            num_requests=num_requests,
            num_decode=num_decode,
            max_seqlen=max_seqlen or self._max_positions,
        )
        return self.apply(plan, wait=True)

    def sampled_tokens(self, plan: StepPlan) -> Tensor:
        """Index in the step of each token whose logits are wanted, padding included."""
        return self._buffers_of(plan).tensors["sampled_tokens"][: plan.shape.sampled]

    def keep_ids(self, plan: StepPlan, ids_R: Tensor) -> None:
        """Stores the sampled tokens for the next step."""
        rows = self._buffers_of(plan).tensors["sampled_rows"][: plan.num_sampled]
        self.last_ids.index_copy_(0, rows, ids_R)

    def resync(self, table: RowTable) -> None:
        """Copies all page tables again, after a step that failed on its way to the device."""
        hosts: tuple[PageTable, PageTable] = (table.window, table.tokens)
        for host, own in zip(hosts, self._tables, strict=True):
            host.take_changes()
            own.replace(host.pages)

    def _buffers_of(self, plan: StepPlan) -> DeviceBuffers:
        return self.mixed if plan.shape.mixed else self.decode

    def _upload(self, buffers: DeviceBuffers, plan: StepPlan, *, wait: bool) -> None:
        buffers.upload(plan, wait=wait)
        if not plan.has_changes:
            return
        window, tokens = self._tables
        tensors = buffers.tensors
        window.apply(tensors["window_cells"], tensors["window_values"], plan.window_changes)
        tokens.apply(tensors["token_cells"], tensors["token_values"], plan.token_changes)

    def _views(self, buffers: DeviceBuffers, num_tokens: int, num_requests: int) -> BatchMetadata:
        """Views of the first rows; those of decode steps are made once for each count."""
        key = (num_tokens, num_requests)
        kept = buffers is self.decode
        found = self._decode_views.get(key) if kept else None
        if found is None:
            tensors = buffers.tensors
            window, tokens = self._tables
            found = BatchMetadata(
                token_ids_T=tensors["token_ids"][:num_tokens],
                positions_T=tensors["positions"][:num_tokens],
                token_requests_T=tensors["token_requests"][:num_tokens],
                query_starts_R1=tensors["query_starts"][: num_requests + 1],
                seqlens_R=tensors["seqlens"][:num_requests],
                state_slots_R=tensors["state_slots"][:num_requests],
                window_pages_RP=window.step_pages[:num_requests],
                token_pages_RP=tokens.step_pages[:num_requests],
                num_tokens=num_tokens,
                num_requests=num_requests,
                num_decode_tokens=0,
                num_decode_requests=0,
                max_seqlen=0,
            )
            if kept:
                self._decode_views[key] = found
        return found
