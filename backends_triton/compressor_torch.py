"""Allocation of compressor state by torch."""

from __future__ import annotations

import torch

from halocline.hal.op import implements
from halocline.hal.ops.compressor import CompressorState, allocate_state

__all__ = ["allocate_state_torch"]


@implements(allocate_state)
def allocate_state_torch(num_slots: int, lanes: int, *, ratio: int, extra_rows: int, device: str) -> CompressorState:
    """See the contract."""
    ring = (2 * ratio if ratio == 4 else ratio) + extra_rows
    return CompressorState(rows_SB2C=torch.zeros((num_slots, ring, 2, lanes), device=device), ratio=ratio)
