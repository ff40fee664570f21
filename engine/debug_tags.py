"""Debug mode: every cached row carries a tag that says what it is, and tags are checked whenever rows are read.

A tag holds the row's position and the fingerprint of all tokens up to it, so a row is right for a request exactly when
the request's own tokens lead to that fingerprint; rows shared through the prefix cache are right for all who share
them. Tags travel through the same page tables and state slots as the rows, on the host, one step at a time: slow, and
meant for tests and for hunting faults.

The fingerprint of position p is F(p) = F(p - 1) * B + h(token p), modulo 2**64, so that a whole chunk is one sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from halocline.hal.errors import MachineError, lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
    from halocline.models.interface import CachePlan, CausalModel, ModelCache, StepOutput

__all__ = ["CacheTagError", "CacheTags", "TaggedCache", "TaggedModel", "fingerprints"]

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_TOKEN = 0xD1342543DE82EF95
_OVERLAPPING_RATIO = 4


class CacheTagError(MachineError):
    """A row was read that is not the row of that position of that request."""


def fingerprints(tokens: NDArray[np.int32], before: int = 0) -> NDArray[np.uint64]:
    """F of each of some consecutive tokens, given F of the position before the first."""
    return _chain(_hashed(tokens), before)


def _hashed(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    return (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_TOKEN)


def _chain(hashed: NDArray[np.uint64], before: int) -> NDArray[np.uint64]:
    powers = _powers(_BASE, len(hashed) + 1)
    sums: NDArray[np.uint64] = np.cumsum(hashed * _powers(_INVERSE, len(hashed)), dtype=np.uint64)
    return sums * powers[:-1] + np.uint64(before) * powers[1:]


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """base**0 to base**(count - 1), modulo 2**64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


class _Tags:
    """Tags of one kind of row: its number in the request, F up to it, and what it added to F."""

    def __init__(self, num_rows: int, step: int) -> None:
        self.number = np.full(num_rows, -1, dtype=np.int64)
        self.fingerprint = np.zeros(num_rows, dtype=np.uint64)
        self.added = np.zeros(num_rows, dtype=np.uint64)
        self._power = np.uint64(pow(_BASE, step, 2**64))

    def write(
        self, slots: NDArray[np.int64], first: int, prints: NDArray[np.uint64], added: NDArray[np.uint64]
    ) -> None:
        self.number[slots] = np.arange(first, first + len(slots))
        self.fingerprint[slots] = prints
        self.added[slots] = added

    def check(self, what: str, slots: NDArray[np.int64], first: int, last: int | None) -> None:
        """Rows first, first + 1, ... of one request: their numbers, their chain, and F of the last if it is known."""
        if len(slots) == 0:
            return
        if slots.min() < 0:
            raise CacheTagError(f"{what} {first + int(slots.argmin())} is read but its page is gone")
        numbers, prints = self.number[slots], self.fingerprint[slots]
        wrong = np.flatnonzero(numbers != np.arange(first, first + len(slots)))
        if len(wrong):
            at = int(wrong[0])
            raise CacheTagError(
                lines(f"{what} {first + at} is read", found=f"row {int(numbers[at])} in slot {int(slots[at])}")
            )
        broken = np.flatnonzero(prints[1:] != prints[:-1] * self._power + self.added[slots[1:]])
        if len(broken) or (last is not None and int(prints[-1]) != last):
            at = int(broken[0]) + 1 if len(broken) else len(slots) - 1
            raise CacheTagError(f"{what} {first + at} is read, but slot {int(slots[at])} holds another request's")


class CacheTags:
    """Tags of all rows of a cache: window rows, entries of each ratio, and state rows of each ratio."""

    def __init__(
        self, geometry: CacheGeometry, *, num_window_pages: int, num_token_pages: int, num_state_slots: int
    ) -> None:
        self.geometry = geometry
        self._window = _Tags(num_window_pages * geometry.window_page_rows, 1)
        self._entries = {ratio: _Tags(num_token_pages * geometry.page_rows(ratio), ratio) for ratio in geometry.ratios}
        self._rings = {ratio: 2 * ratio if ratio == _OVERLAPPING_RATIO else ratio for ratio in geometry.ratios}
        self._state = {ratio: _Tags(num_state_slots * ring, 1) for ratio, ring in self._rings.items()}

    def copy_state(self, sources: list[int], targets: list[int]) -> None:
        """Follows a copy of compressor state."""
        for ratio, tags in self._state.items():
            for array in (tags.number, tags.fingerprint, tags.added):
                by_slot = array.reshape(-1, self._rings[ratio])
                by_slot[targets] = by_slot[sources]

    def step(self, batch: BatchMetadata) -> NDArray[np.uint64]:
        """Tags the rows that a step writes and checks all that its queries read.

        Returns:
            F of each token of the step; 0 on padding.

        Raises:
            CacheTagError: If a row is missing or belongs elsewhere.
        """
        starts: list[int] = batch.query_starts_R1.tolist()
        seqlens: list[int] = batch.seqlens_R.tolist()
        slots: list[int] = batch.state_slots_R.tolist()
        ids, positions = batch.token_ids_T.cpu().numpy(), batch.positions_T.cpu().numpy()
        window_pages, token_pages = batch.window_pages_RP.cpu().numpy(), batch.token_pages_RP.cpu().numpy()
        prints = np.zeros(len(ids), dtype=np.uint64)
        for request, end in enumerate(seqlens):
            first, stop = starts[request], starts[request + 1]
            if stop == first:
                continue
            start = end - (stop - first)
            if start < 0 or positions[first] != start or positions[stop - 1] != end - 1:
                raise CacheTagError(f"tokens of request {request} say other positions than {start} to {end - 1}")
            hashed = _hashed(ids[first:stop])
            pages = (window_pages[request], token_pages[request])
            prints[first:stop] = self._feed(start, hashed, slots[request], *pages)
        return prints

    def _feed(
        self,
        start: int,
        hashed: NDArray[np.uint64],
        slot: int,
        window_pages: NDArray[np.int32],
        token_pages: NDArray[np.int32],
    ) -> NDArray[np.uint64]:
        """Tags and checks the rows of one request, in the order in which a model writes and reads them."""
        geometry, end = self.geometry, start + len(hashed)
        oldest = max(0, start - geometry.window + 1)
        slots = _slots(window_pages, oldest, end, geometry.window_page_rows)
        before = 0
        if start:
            before = int(self._window.fingerprint[slots[start - oldest - 1]])
            self._window.check("window row", slots[: start - oldest], oldest, None)
        prints = _chain(hashed, before)
        if slots.min() < 0:
            raise CacheTagError(f"a window row from {oldest} to {end - 1} has no page")
        self._window.write(slots[start - oldest :], start, prints, hashed)
        self._window.check("window row", slots, oldest, int(prints[-1]))
        for ratio in geometry.ratios:
            self._feed_compressor(ratio, start, hashed, prints, before, slot, token_pages)
        return prints

    def _feed_compressor(
        self,
        ratio: int,
        start: int,
        hashed: NDArray[np.uint64],
        prints: NDArray[np.uint64],
        before: int,
        slot: int,
        token_pages: NDArray[np.int32],
    ) -> None:
        end, ring, state, entries = start + len(hashed), self._rings[ratio], self._state[ratio], self._entries[ratio]
        first_entry, stop_entry = start // ratio, end // ratio
        block = first_entry * ratio
        needed = max(0, block - ratio) if ratio == _OVERLAPPING_RATIO else block
        kept = slot * ring + np.arange(needed, start) % ring
        state.check(f"state of ratio {ratio}, position", kept, needed, before)
        added = np.concatenate((state.added[kept[block - needed :]], hashed))
        closed = added[: (stop_entry - first_entry) * ratio].reshape(-1, ratio)
        page_rows = self.geometry.page_rows(ratio)
        slots = _slots(token_pages, 0, stop_entry, page_rows)
        if len(slots) and slots.min() < 0:
            raise CacheTagError(f"an entry of ratio {ratio} before {stop_entry} has no page")
        ends = np.arange(first_entry + 1, stop_entry + 1) * ratio - 1 - start
        sums = (closed * _powers(_BASE, ratio)[::-1]).sum(axis=1, dtype=np.uint64)
        entries.write(slots[first_entry:], first_entry, prints[ends], sums)
        last = int(prints[stop_entry * ratio - 1 - start]) if stop_entry > first_entry else None
        entries.check(f"entry of ratio {ratio},", slots, 0, last)
        fresh = np.arange(max(start, end - ring), end)
        state.write(slot * ring + fresh % ring, int(fresh[0]), prints[fresh - start], hashed[fresh - start])


def _slots(pages: NDArray[np.int32], start: int, stop: int, unit: int) -> NDArray[np.int64]:
    """Slots of consecutive rows of a request; -1 where there is no page."""
    rows = np.arange(start, stop)
    found = pages[rows // unit].astype(np.int64)
    return np.where(found < 0, -1, found * unit + rows % unit)


class TaggedCache:
    """A model's cache together with its tags."""

    def __init__(self, inner: ModelCache, tags: CacheTags) -> None:
        self.inner = inner
        self.tags = tags

    @property
    def plan(self) -> CachePlan:
        """What the model's cache takes; tags are not counted."""
        return self.inner.plan

    @property
    def nbytes(self) -> int:
        """Bytes of the model's cache."""
        return self.inner.nbytes

    def copy_state(self, sources: list[int], targets: list[int]) -> None:
        """Copies compressor state and its tags."""
        self.inner.copy_state(sources, targets)
        self.tags.copy_state(sources, targets)


class TaggedModel:
    """A model that checks, before each forward pass, that the pass will read the right rows."""

    def __init__(self, inner: CausalModel) -> None:
        self.inner = inner
        self.vocab_size = inner.vocab_size
        self.max_positions = inner.max_positions
        self.distinct_layers = inner.distinct_layers
        self.cache_plan = inner.cache_plan
        self.plan_step = inner.plan_step
        self.compute_logits = inner.compute_logits

    def allocate_cache(
        self, plan: CachePlan, *, num_window_pages: int, num_token_pages: int, num_state_slots: int
    ) -> TaggedCache:
        """Allocates the model's caches and their tags."""
        sizes = {
            "num_window_pages": num_window_pages,
            "num_token_pages": num_token_pages,
            "num_state_slots": num_state_slots,
        }
        return TaggedCache(self.inner.allocate_cache(plan, **sizes), CacheTags(plan.geometry, **sizes))

    def forward(
        self, batch: BatchMetadata, plan: AttentionPlan, cache: ModelCache, *, layers: Sequence[int] | None = None
    ) -> StepOutput:
        """Checks tags, then runs the model."""
        assert isinstance(cache, TaggedCache), "the cache comes from `allocate_cache`"
        cache.tags.step(batch)
        return self.inner.forward(batch, plan, cache.inner, layers=layers)
