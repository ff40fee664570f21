"""Captured decode steps: one recording for each of a few batch sizes, replayed on persistent buffers.

Capturing belongs to the backend. What is recorded is a function without arguments that reads the step's buffers and
plan and writes logits to a buffer, so a replay with other numbers in the same places is another step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from halocline.hal.errors import MachineError, lines

if TYPE_CHECKING:
    from halocline.engine.step_plan import StepShape

__all__ = ["DecodeGraphs", "GraphCapture", "RerunCapture", "StepMismatchError"]


class StepMismatchError(MachineError):
    """A rank would do something else in a step than the rank that schedules has decided."""


class GraphCapture(Protocol):
    """A backend's way to record device work."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records what `run` launches; the result launches it again.

        Args:
            run: Uses only buffers that keep their addresses. It has been run before, so nothing is compiled in it.
        """
        ...


class RerunCapture:
    """Stands in where a device has no graphs: a replay runs the function again on the same buffers.

    It proves what graphs rely on: that a step depends on nothing but what lies in the buffers.
    """

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs once, as a recording would, and keeps the function."""
        run()
        return run


class DecodeGraphs:
    """Recordings by batch size.

    Attributes:
        sizes: Batch sizes, ascending.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = tuple(sorted(sizes))
        self._replays: dict[int, Callable[[], None]] = {}

    def record(self, capture: GraphCapture, step_of: Callable[[int], Callable[[], None]]) -> None:
        """Records every size, the largest first so that smaller ones fit into its memory.

        Args:
            capture: The backend's.
            step_of: Makes the function to record for a size, with its buffers filled with padding.
        """
        for size in reversed(self.sizes):
            run = step_of(size)
            run()
            self._replays[size] = capture.capture(run)

    def size_for(self, num_requests: int) -> int | None:
        """The smallest recorded size that holds this many requests, or None."""
        return next((size for size in self.sizes if size >= num_requests and size in self._replays), None)

    def replay(self, size: int) -> None:
        """Launches the recording of a size."""
        self._replays[size]()

    def clear(self) -> None:
        """Lets the recordings go. A group's library may wait for those that hold its collectives before it ends."""
        self._replays.clear()

    def check(self, shape: StepShape) -> None:
        """Compares what was decided for all ranks with what this one would do.

        Raises:
            StepMismatchError: Before anything is run, so that no rank waits for a collective that others never enter.
        """
        own = 0 if shape.mixed else self.size_for(shape.sampled) or 0
        if own != shape.graph_size:
            raise StepMismatchError(
                lines(
                    f"ranks would run different graphs for {shape.sampled} requests",
                    asked=f"the graph of {shape.graph_size}" if shape.graph_size else "no graph",
                    found=f"the graph of {own}" if own else "no graph",
                    try_="start all ranks again with the same options",
                )
            )
