"""The memory of this process's device, and how much of it caches may take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halocline.engine.memory_plan import cache_limit

if TYPE_CHECKING:
    from halocline.engine.load_options import LoadOptions
    from halocline.hal.device import Device
    from halocline.hal.place import RankPlace

__all__ = ["cache_bytes", "device_of_process", "local_device"]

# When nobody says: the rest of a GPU is for activations and workspaces; a CPU shares its memory with everything else.
_GPU_FRACTION = 0.9
_CPU_CACHE_BYTES = 4 * 2**30


def device_of_process(device: Device, options: LoadOptions) -> str:
    """The device of this process in torch's words; of several ranks on a machine each has its own."""
    place = options.settings.place()
    return device.torch_device if place is None else local_device(device, place)


def local_device(device: Device, place: RankPlace) -> str:
    """The device of one of several ranks in torch's words."""
    return f"{device.torch_device}:{place.local_rank}" if device.is_gpu else device.torch_device


def cache_bytes(device: Device, options: LoadOptions) -> int:
    """Bytes that the caches may take, now that the weights are there."""
    total, used = _memory(device, options)
    if options.cache_bytes is not None:
        return cache_limit(total_bytes=total, used_bytes=used, limit_bytes=options.cache_bytes)
    if options.memory_fraction is not None or device.is_gpu:
        fraction = _GPU_FRACTION if options.memory_fraction is None else options.memory_fraction
        return cache_limit(total_bytes=total, used_bytes=used, fraction=fraction)
    return min(total - used, _CPU_CACHE_BYTES)


def _memory(device: Device, options: LoadOptions) -> tuple[int, int]:
    """Total and used bytes of the memory in which caches lie; what the system can reclaim is not used.

    Neither is what the conversion of weights left behind in torch's allocator: a GPU gets that back first.

    Ranks that share a machine's main memory have equal parts of it.
    """
    if device.is_gpu:
        index = torch.device(device_of_process(device, options))
        module = torch.get_device_module(index)
        with module.device(index):
            module.empty_cache()
        free, total = module.mem_get_info(index)
        return total, total - free
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(facts[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    place = options.settings.place()
    sharing = 1 if place is None else place.local_world
    return total // sharing, (total - free) // sharing
