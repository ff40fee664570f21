"""Target: the facts of a device on which tile sizes depend. No launcher asks who made the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = ["Target", "target_of"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What tile sizes depend on.

    Attributes:
        shared_memory: Bytes of on-chip memory that one program may take.
        wave_size: Lanes that run in step.
        num_processors: Programs that run at a time if each fills a processor.
    """

    shared_memory: int
    wave_size: int
    num_processors: int

    @property
    def has_large_tiles(self) -> bool:
        """Whether tiles of well over 64 KiB fit beside the buffers of a software pipeline."""
        return self.shared_memory > 128 * 1024


@lru_cache(maxsize=16)
def target_of(device: torch.device) -> Target:
    """The facts of a device; a CPU, where kernels are interpreted, counts as the smallest device."""
    if device.type == "cpu":
        return Target(shared_memory=64 * 1024, wave_size=32, num_processors=4)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    return Target(
        shared_memory=int(shared),
        wave_size=int(found.warp_size),
        num_processors=int(found.multi_processor_count),
    )
