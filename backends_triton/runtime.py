"""Runtime services of a GPU through torch, which has one interface for both vendors.

Graphs, memory facts, waiting, and the parallel compilation of kernels before their first launch.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from halocline.hal.backend import Progress
    from halocline.kernels_portable.aot import Launch

__all__ = ["RECORDED", "RUNTIME", "TorchRuntime"]

logger = logging.getLogger(__name__)

RECORDED = frozenset({"triton"})
"""Libraries whose kernels do nothing while launches are recorded.

What another library launches would happen, on numbers that no kernel has written.
"""


class TorchRuntime:
    """What the engine needs of the device of this process beside kernels.

    All graphs share one pool: they never run at the same time, so that the memory of the largest serves the others.
    The allocator forgets a pool with its last graph, so that graphs made after that share another.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # torch's own type, which its releases name differently
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records what `run` launches; the result launches it again on the same buffers.

        Args:
            run: Uses only buffers that keep their addresses. It has been run before, so nothing is compiled in it.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._graphs.add(graph)
        return graph.replay

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        return torch.cuda.mem_get_info()

    def synchronize(self) -> None:
        """Waits until the device has done what was launched."""
        torch.cuda.synchronize()

    def can_build(self, libraries: Collection[str]) -> bool:
        """Whether every launch of kernels over these libraries can be recorded instead."""
        return RECORDED.issuperset(libraries)

    def build(self, run: Callable[[], None], *, libraries: Collection[str], workers: int, progress: Progress) -> None:
        """Compiles side by side what `run` would launch. See `halocline.hal.backend.Backend`."""
        try:
            self._build(run, libraries, workers, progress)
        except Exception as error:  # whatever a step may raise on numbers that nothing has computed
            logger.debug("kernels are compiled when first launched: %s: %s", type(error).__name__, error)

    def _build(self, run: Callable[[], None], libraries: Collection[str], workers: int, progress: Progress) -> None:
        self._compile(self._launches(run), workers, progress)

    def _launches(self, run: Callable[[], None]) -> list[Launch]:
        """What `run` would launch through Triton, each once."""
        from triton.runtime import driver

        from halocline.kernels_portable.build import distinct_launches

        return distinct_launches(run, driver.active.get_current_target())

    def _compile(
        self,
        launches: Sequence[Launch],
        workers: int,
        progress: Progress,
        *,
        others: Mapping[Future[None], str] = MappingProxyType({}),
    ) -> None:
        """Compiles launches, and waits for other work that compiles."""
        from halocline.kernels_portable.build import build_launches

        begin_thread = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
        build_launches(launches, workers=workers, progress=progress, begin_thread=begin_thread, others=others)


RUNTIME = TorchRuntime()
