"""StepPlan: what one step does, decided once and sendable as one string of bytes.

The rank that schedules writes it; every rank of the same attention group carries it out, so nobody decides anything
twice. A plan is a few counts and the packed numbers of the step (`StepLayout` says where each array lies in them).

Wire form: `_HEAD` (fixed counts), then int32 numbers of varying count, then the packed numbers.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Copies", "StepLayout", "StepPlan", "StepShape"]

Copies = tuple[tuple[int, int], ...]
"""Compressor state to copy between slots: pairs of source and target."""

# mixed, graph_size, num_tokens, sampled, padded_requests, num_decode, num_sampled, max_seqlen, window_changes,
# token_changes; numbers of scored rounds, copies and restores; bytes that follow.
_HEAD = struct.Struct("<14i")


class StepLayout:
    """Where each array of a step lies in its packed numbers. The same sizes give the same layout on every rank.

    Changes of page tables lie last: most steps have none and leave them out.

    Attributes:
        max_tokens: Tokens that fit.
        max_requests: Requests that fit.
        max_changes: Page table entries that one upload carries, of each table.
        nbytes: Of all arrays.
        nbytes_without_changes: Of the arrays before the changes.
    """

    def __init__(self, max_tokens: int, max_requests: int, max_changes: int) -> None:
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.max_changes = max_changes
        self._sections: dict[str, tuple[int, int, torch.dtype]] = {}
        self.nbytes = 0
        for name, length, dtype in (
            ("rows", max_requests, torch.int64),
            ("sampled_rows", max_requests, torch.int64),
            ("sampled_tokens", max_requests, torch.int64),
            ("query_starts", max_requests + 1, torch.int32),
            ("seqlens", max_requests, torch.int32),
            ("state_slots", max_requests, torch.int32),
            ("token_ids", max_tokens, torch.int32),
            ("positions", max_tokens, torch.int32),
            ("token_requests", max_tokens, torch.int32),
        ):
            self._add(name, length, dtype)
        self.nbytes_without_changes = self.nbytes
        for table in ("window", "token"):
            self._add(f"{table}_cells", max_changes, torch.int64)
            self._add(f"{table}_values", max_changes, torch.int32)

    def _add(self, name: str, length: int, dtype: torch.dtype) -> None:
        start = self.nbytes
        self._sections[name] = (start, start + length * dtype.itemsize, dtype)
        self.nbytes = -(-self._sections[name][1] // 8) * 8

    def views(self, packed: Tensor) -> dict[str, Tensor]:
        """The arrays in a buffer of `nbytes` bytes, by name."""
        return {name: packed[start:stop].view(dtype) for name, (start, stop, dtype) in self._sections.items()}


class StepShape(NamedTuple):
    """What all ranks have to agree on, because collectives follow from it: taken once, for all attention groups.

    Attributes:
        mixed: Whether any group prefills; the others then use the buffers of such steps too.
        num_tokens: Tokens that each group feeds, padding included.
        sampled: Rows of logits that each group computes for sampling; 0 leaves them out.
        graph_size: Recording to replay, or 0 to run eagerly.
        scored: Rows of each further computation of logits, for log-probabilities of prompts.
    """

    mixed: bool
    num_tokens: int
    sampled: int
    graph_size: int = 0
    scored: tuple[int, ...] = ()


class StepPlan(NamedTuple):
    """One step of one attention group; without tokens, changes of its page tables that go before a step.

    Attributes:
        shape: What all groups share.
        packed: The packed numbers, in host memory, as far as they are used.
        num_requests: Requests, padding included.
        num_decode: Requests that decode, padding included; each brings one token.
        num_sampled: Rows that are sampled.
        max_seqlen: Longest sequence after the step.
        window_changes: Changed entries of the table of window pages.
        token_changes: The same of token pages.
        scored: First hidden row and number of rows of each round of `shape.scored`.
        copies: State to copy before the step: what the last one has reached.
        restores: State to copy after that: what requests resume from.
    """

    shape: StepShape
    packed: Tensor
    num_requests: int
    num_decode: int
    num_sampled: int
    max_seqlen: int
    window_changes: int = 0
    token_changes: int = 0
    scored: tuple[tuple[int, int], ...] = ()
    copies: Copies = ()
    restores: Copies = ()

    @property
    def has_changes(self) -> bool:
        """Whether changes of page tables are part of it."""
        return self.window_changes > 0 or self.token_changes > 0

    def to_bytes(self) -> bytes:
        """The plan as a string of bytes."""
        shape, packed = self.shape, self.packed.numpy().tobytes()
        numbers = [*shape.scored]
        for pairs in (self.scored, self.copies, self.restores):
            for pair in pairs:
                numbers += pair
        head = _HEAD.pack(
            shape.mixed,
            shape.graph_size,
            shape.num_tokens,
            shape.sampled,
            self.num_requests,
            self.num_decode,
            self.num_sampled,
            self.max_seqlen,
            self.window_changes,
            self.token_changes,
            len(shape.scored),
            len(self.copies),
            len(self.restores),
            len(packed),
        )
        return head + np.array(numbers, dtype="<i4").tobytes() + packed

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> tuple[StepPlan, int]:
        """Reads a plan from the start of a string of bytes.

        Returns:
            The plan, whose packed numbers are a copy, and the bytes that it took.
        """
        head = _HEAD.unpack_from(data)
        rounds, num_copies, num_restores, size = head[10:]
        count = 3 * rounds + 2 * (num_copies + num_restores)
        start = _HEAD.size + 4 * count
        numbers: list[int] = np.frombuffer(data, dtype="<i4", count=count, offset=_HEAD.size).tolist()
        pairs = list(zip(numbers[rounds::2], numbers[rounds + 1 :: 2], strict=True))
        packed = np.frombuffer(data, dtype=np.uint8, count=size, offset=start).copy()
        plan = cls(
            shape=StepShape(
                mixed=bool(head[0]),
                graph_size=head[1],
                num_tokens=head[2],
                sampled=head[3],
                scored=tuple(numbers[:rounds]),
            ),
            packed=torch.from_numpy(packed),
            num_requests=head[4],
            num_decode=head[5],
            num_sampled=head[6],
            max_seqlen=head[7],
            window_changes=head[8],
            token_changes=head[9],
            scored=tuple(pairs[:rounds]),
            copies=tuple(pairs[rounds : rounds + num_copies]),
            restores=tuple(pairs[rounds + num_copies :]),
        )
        return plan, start + size
