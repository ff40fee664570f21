"""The attention plan of a step: buffers at the capacity of the first batch, refreshed in place by portable kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.ops.attention import AttentionPlan, PrefillLayout, RowSelection
from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
from halocline.kernels_portable.row_plan import plan_blocks, plan_window

__all__ = ["PlanBuffers", "make_plan"]

_OWNER = "plan"  # key of the buffers in the plan's scratch
_MULTIPLE = 64  # entries of a row, so that no kernel has to copy a selection to widen it


def _rounded(width: int) -> int:
    return max(-(-width // _MULTIPLE), 1) * _MULTIPLE


@dataclass(eq=False, kw_only=True)
class PlanBuffers:
    """What a plan's views lie in, by name."""

    num_tokens: int
    own_T: Tensor
    window_slots_TK: Tensor
    window_lengths_T: Tensor
    visible: dict[int, Tensor]
    slots: dict[int, Tensor]

    @classmethod
    def allocate(cls, geometry: CacheGeometry, num_tokens: int, device: torch.device) -> PlanBuffers:
        """Buffers for up to so many tokens at any position."""

        def integers(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        return cls(
            num_tokens=num_tokens,
            own_T=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            window_slots_TK=integers(num_tokens, _rounded(geometry.window)),
            window_lengths_T=integers(num_tokens),
            visible={ratio: integers(num_tokens) for ratio in geometry.ratios},
            slots={
                ratio: integers(num_tokens, _rounded(geometry.max_positions // ratio))
                for ratio in geometry.ratios
                if ratio != 4
            },
        )


def make_plan(
    batch: BatchMetadata, geometry: CacheGeometry, prefill_layout: PrefillLayout, reuse: AttentionPlan | None
) -> AttentionPlan:
    """See `halocline.hal.ops.attention.plan`.

    Scratch that kernels left for the step before is dropped: schedules depend on lengths.
    """
    num_tokens = batch.positions_T.shape[0]
    kept = None if reuse is None else reuse.kernel_state.get(_OWNER)
    buffers = (
        kept if isinstance(kept, PlanBuffers) else PlanBuffers.allocate(geometry, num_tokens, batch.positions_T.device)
    )
    if num_tokens > buffers.num_tokens:
        raise ShapeError(f"a plan of capacity {buffers.num_tokens} cannot hold {num_tokens} tokens")
    positions_T, requests_T = batch.positions_T, batch.token_requests_T
    own_T = buffers.own_T[:num_tokens]
    window_rows = RowSelection(
        buffers.window_slots_TK[:num_tokens, : geometry.window], buffers.window_lengths_T[:num_tokens]
    )
    plan_window(
        positions_T,
        requests_T,
        batch.window_pages_RP,
        page_rows=geometry.window_page_rows,
        slots_TK=window_rows.slots_TK,
        lengths_T=window_rows.lengths_T,
        own_T=own_T,
    )
    visible: dict[int, Tensor] = {}
    all_rows: dict[int, RowSelection] = {}
    for ratio in geometry.ratios:
        visible[ratio] = buffers.visible[ratio][:num_tokens]
        slots_TK = None
        if ratio in buffers.slots:
            slots_TK = buffers.slots[ratio][:num_tokens, : max(batch.max_seqlen // ratio, 1)]
            all_rows[ratio] = RowSelection(slots_TK, visible[ratio])
        plan_blocks(
            positions_T,
            requests_T,
            batch.token_pages_RP,
            ratio=ratio,
            page_rows=geometry.page_rows(ratio),
            visible_T=visible[ratio],
            slots_TK=slots_TK,
        )
    if reuse is None:
        return AttentionPlan(
            batch=batch,
            geometry=geometry,
            prefill_layout=prefill_layout,
            window_slot_mapping_T=own_T,
            window_rows=window_rows,
            visible=visible,
            all_rows=all_rows,
            kernel_state={_OWNER: buffers},
        )
    reuse.batch, reuse.window_slot_mapping_T, reuse.window_rows = batch, own_T, window_rows
    reuse.visible, reuse.all_rows = visible, all_rows
    reuse.kernel_state = {_OWNER: buffers}
    return reuse
