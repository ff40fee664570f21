"""Runtime services of NVIDIA's devices: what both vendors share, and the compilation of what libraries compile."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from halocline.backends_cuda.flash_mla_library import HEADS, num_schedule_parts
from halocline.backends_cuda.library_builds import LibraryBuilds
from halocline.backends_cuda.manifest import FLASHMLA
from halocline.backends_cuda.noted_calls import STOOD_IN, noting
from halocline.backends_triton.runtime import RECORDED, TorchRuntime

if TYPE_CHECKING:
    from halocline.hal.backend import Progress

__all__ = ["RUNTIME", "CudaRuntime"]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class CudaRuntime(TorchRuntime):
    """Runtime services whose `build` also knows what kernels over CUDA libraries call."""

    def can_build(self, libraries: Collection[str]) -> bool:
        """See `halocline.hal.backend.Backend`."""
        return (RECORDED | STOOD_IN).issuperset(libraries)

    def _build(self, run: Callable[[], None], libraries: Collection[str], workers: int, progress: Progress) -> None:
        device = _device()
        if any(provider.module in libraries for provider in FLASHMLA):
            for num_heads in HEADS:
                num_schedule_parts(num_heads, device)  # what the library itself says, while it is there to be asked
        with noting(libraries) as calls:
            launches = self._launches(run)
        with LibraryBuilds(list(calls.values()), device, workers=workers) as builds:
            self._compile(launches, workers, progress, others=builds.pending)


RUNTIME = CudaRuntime()
