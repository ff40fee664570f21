"""Runtime services of a GPU through torch, which has one interface for both vendors: graphs, memory facts, waiting."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["RUNTIME", "TorchRuntime"]


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


RUNTIME = TorchRuntime()
