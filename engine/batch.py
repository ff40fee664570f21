"""Batch: what the scheduler decided for one step. Numbers of the host; the batch builder makes tensors of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from halocline.engine.request import Request

__all__ = ["Batch", "Chunk"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunk:
    """Known tokens of one request that a step computes.

    Attributes:
        request: Whose.
        row: Its engine row.
        start: First position.
        end: Position behind the last.
        samples: Whether these are its last known tokens and the next one is drawn.
    """

    request: Request
    row: int
    start: int
    end: int
    samples: bool


@dataclass(eq=False, kw_only=True)
class Batch:
    """One step: requests that decode one token each, then chunks of prompts.

    Attributes:
        decode_requests: Requests that decode.
        decode_rows: Their engine rows.
        chunks: Prefill, in order.
        sampled_requests: Requests that get a token: those that decode, then the chunks that sample.
        sampled_rows: Their engine rows.
        copies: State slots to copy before the step: source, target. What the last step has reached.
        restores: The same, after these: what requests resume from.
        num_tokens: Tokens of the step.
    """

    decode_requests: list[Request]
    decode_rows: NDArray[np.int32]
    chunks: list[Chunk] = field(default_factory=list)
    sampled_requests: list[Request] = field(default_factory=list)
    sampled_rows: tuple[int, ...] = ()
    copies: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def num_requests(self) -> int:
        """Requests that bring tokens."""
        return len(self.decode_requests) + len(self.chunks)

    def requests(self) -> list[Request]:
        """Requests that bring tokens, in the order of the step."""
        return [*self.decode_requests, *(chunk.request for chunk in self.chunks)]
