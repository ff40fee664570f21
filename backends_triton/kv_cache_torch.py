"""Allocation of paged caches by torch."""

from __future__ import annotations

import torch

from halocline.hal.errors import ConfigError, OutOfPagesError
from halocline.hal.formats import CacheLayout
from halocline.hal.op import implements
from halocline.hal.ops.kv_cache import CacheHandle, allocate

__all__ = ["allocate_torch"]


@implements(allocate)
def allocate_torch(layout: CacheLayout, num_pages: int, *, device: str) -> CacheHandle:
    """See the contract."""
    if layout.storage != "bytes":
        raise ConfigError(f"caches kept for gradients ({layout.storage}) need kv_cache.allocate=reference")
    try:
        pages = torch.zeros((num_pages, layout.page_stride), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        needed = num_pages * layout.page_stride
        raise OutOfPagesError(f"a cache of {num_pages} pages ({needed:,} bytes) does not fit on {device}") from error
    return CacheHandle(layout=layout, num_pages=num_pages, pages=pages)
