"""How much of a device caches may take."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halocline.engine.device_memory import cache_bytes

GIB = 2**30


class Allocator:
    """torch's module of a device on which converting weights has left blocks behind."""

    def __init__(self, total: int, held: int, left_behind: int) -> None:
        self.total, self.held, self.left_behind = total, held, left_behind

    def device(self, _index: torch.device) -> Any:
        return nullcontext()

    def empty_cache(self) -> None:
        self.left_behind = 0

    def mem_get_info(self, _index: torch.device) -> tuple[int, int]:
        return self.total - self.held - self.left_behind, self.total


@pytest.mark.parametrize(
    ("limit", "fraction", "expected"), [(None, None, 26 * GIB), (None, 1.0, 40 * GIB), (7, None, 7)]
)
def test_blocks_that_loading_left_behind_are_free_for_caches(
    limit: int | None, fraction: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _index: Allocator(140 * GIB, 100 * GIB, 30 * GIB))
    settings = SimpleNamespace(place=lambda: None)
    options: Any = SimpleNamespace(settings=settings, cache_bytes=limit, memory_fraction=fraction)
    device: Any = SimpleNamespace(is_gpu=True, torch_device="cuda")
    assert cache_bytes(device, options) == expected
