"""The layout of prefill, decided here and nowhere else, once, before kernels are chosen.

*Paged* prefill reads cached rows through the page table, with the decode kernel's arithmetic. *Ragged* prefill gathers
them into a workspace first and runs the sparse prefill kernel over it. The value is a trait of the request for
`attention.sparse_prefill` and a field of the attention plan, which eager, capture and replay all read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halocline.hal.device import Device
from halocline.hal.settings import Settings

if TYPE_CHECKING:
    from halocline.hal.ops.attention import PrefillLayout

__all__ = ["decide_prefill_layout"]


def decide_prefill_layout(settings: Settings, device: Device) -> PrefillLayout:
    """The layout that a setting forces, else the device's default: ragged on a GPU, paged on a CPU."""
    if settings.prefill_layout == "paged":
        return "paged"
    if settings.prefill_layout == "ragged":
        return "ragged"
    return "ragged" if device.is_gpu else "paged"
