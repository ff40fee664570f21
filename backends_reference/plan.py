"""Reference plan: the row selections of a step, in plain integer arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan, PrefillLayout, RowSelection, plan
from halocline.hal.ops.batch import BatchMetadata, CacheGeometry

__all__ = ["plan_reference", "slots_of_positions"]


def slots_of_positions(pages_RP: Tensor, requests_T: Tensor, units_TK: Tensor, unit_rows: int) -> Tensor:
    """Maps row numbers of requests to cache slots.

    Args:
        pages_RP: int32 page of each `unit_rows` rows of a request; -1 where there is none.
        requests_T: Request of each token; -1 on padding.
        units_TK: Row numbers (positions, or compressed entries); negative means none.
        unit_rows: Rows in a page.

    Returns:
        int64 slots of the shape of `units_TK`; -1 where the row, the page or the request does not exist.
    """
    rows = units_TK.clamp_min(0).long()
    columns = (rows // unit_rows).clamp_max(pages_RP.shape[1] - 1)
    pages = pages_RP[requests_T.long().clamp_min(0)[:, None], columns].long()
    slots = pages * unit_rows + rows % unit_rows
    missing = (units_TK < 0) | (pages < 0) | (requests_T < 0)[:, None] | (rows // unit_rows >= pages_RP.shape[1])
    return slots.masked_fill(missing, -1)


class _Buffers:
    """Persistent buffers of a plan, at the capacity of its first batch."""

    def __init__(self, reuse: AttentionPlan | None, num_tokens: int) -> None:
        kept = reuse.kernel_state.get("reference") if reuse is not None else None
        self.tensors: dict[str, Tensor] = kept if isinstance(kept, dict) else {}
        self.num_tokens = num_tokens

    def store(self, name: str, values: Tensor, columns: int | None) -> Tensor:
        """Copies values into the top left of the named buffer and returns that view."""
        capacity = (self.num_tokens,) if columns is None else (self.num_tokens, columns)
        if name not in self.tensors:
            self.tensors[name] = values.new_full(capacity, -1 if values.dtype != torch.bool else 0)
        buffer = self.tensors[name]
        if any(have < need for have, need in zip(buffer.shape, values.shape, strict=True)):
            raise ShapeError(f"a plan of capacity {tuple(buffer.shape)} cannot hold {tuple(values.shape)} for {name}")
        view = buffer[tuple(slice(size) for size in values.shape)]
        return view.copy_(values)


@implements(plan)
def plan_reference(
    batch: BatchMetadata,
    geometry: CacheGeometry,
    prefill_layout: PrefillLayout,
    *,
    reuse: AttentionPlan | None = None,
) -> AttentionPlan:
    """See the contract."""
    positions, requests = batch.positions_T, batch.token_requests_T
    buffers = _Buffers(reuse, positions.shape[0])
    window = geometry.window

    def window_slots(positions_TK: Tensor) -> Tensor:
        return slots_of_positions(batch.window_pages_RP, requests, positions_TK, geometry.window_page_rows)

    oldest_T = (positions - (window - 1)).clamp_min(0)
    seen_TW = oldest_T[:, None] + torch.arange(window, device=positions.device, dtype=positions.dtype)
    seen_TW = seen_TW.masked_fill(seen_TW > positions[:, None], -1)
    window_rows = RowSelection(
        buffers.store("window_slots", window_slots(seen_TW).int(), window),
        buffers.store("window_lengths", (positions + 1).clamp(0, window).int(), None),
    )
    visible: dict[int, Tensor] = {}
    all_rows: dict[int, RowSelection] = {}
    for ratio in geometry.ratios:
        visible[ratio] = buffers.store(f"visible_{ratio}", ((positions + 1) // ratio).int(), None)
        if ratio == 4:
            continue
        entries = torch.arange(max(batch.max_seqlen // ratio, 1), device=positions.device)
        entries_TK = entries.expand(positions.shape[0], -1)
        slots_TK = slots_of_positions(batch.token_pages_RP, requests, entries_TK, geometry.page_rows(ratio))
        slots_TK = slots_TK.masked_fill(entries_TK >= visible[ratio][:, None], -1)
        capacity = max(geometry.max_positions // ratio, 1)
        all_rows[ratio] = RowSelection(buffers.store(f"slots_{ratio}", slots_TK.int(), capacity), visible[ratio])
    own = buffers.store("own", window_slots(positions[:, None])[:, 0], None)
    if reuse is None:
        return AttentionPlan(
            batch=batch,
            geometry=geometry,
            prefill_layout=prefill_layout,
            window_slot_mapping_T=own,
            window_rows=window_rows,
            visible=visible,
            all_rows=all_rows,
            kernel_state={"reference": buffers.tensors},
        )
    reuse.batch, reuse.window_slot_mapping_T, reuse.window_rows = batch, own, window_rows
    reuse.visible, reuse.all_rows = visible, all_rows
    return reuse
