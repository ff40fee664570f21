"""CacheManager: which pages and slots each row holds. Frees what left the window, evicts, and only then gives up.

Three pools (window pages, token pages, state slots) and one prefix tree over them; see docs/adr/0005.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halocline.engine.page_pool import PagePool
from halocline.engine.prefix_cache import Match, PrefixCache
from halocline.engine.row_table import RowTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from halocline.engine.memory_plan import MemoryPlan
    from halocline.engine.prefix_cache import Node
    from halocline.engine.request import Request

__all__ = ["CacheManager", "CacheUsage"]


@dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """Pages and slots at one moment.

    Attributes:
        window_pages: Held by requests, held by the prefix cache alone, free.
        token_pages: The same.
        state_slots: The same.
    """

    window_pages: tuple[int, int, int]
    token_pages: tuple[int, int, int]
    state_slots: tuple[int, int, int]

    @classmethod
    def sum_of(cls, usages: Sequence[CacheUsage]) -> CacheUsage:
        """The same counts of several caches together."""

        def total(triples: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
            held, kept, free = (sum(counts) for counts in zip(*triples, strict=True))
            return held, kept, free

        return cls(
            window_pages=total(usage.window_pages for usage in usages),
            token_pages=total(usage.token_pages for usage in usages),
            state_slots=total(usage.state_slots for usage in usages),
        )


class CacheManager:
    """Pages of all rows.

    Attributes:
        memory: Sizes of the pools.
        table: Rows and their page tables.
        window_pool, token_pool, slot_pool: The pools.
        prefix: The prefix tree, or None where prefixes are not kept.
        restores: See `take_restores`; their sources are shared so that nobody takes them before the copy.
    """

    def __init__(self, memory: MemoryPlan, *, prefix_caching: bool) -> None:
        geometry = memory.cache_plan.geometry
        self.memory = memory
        self.window = geometry.window
        self.window_rows = geometry.window_page_rows
        self.page_tokens = geometry.page_tokens
        self.table = RowTable(memory.max_requests, memory.max_positions, geometry)
        self.window_pool = PagePool("window page", memory.num_window_pages)
        self.token_pool = PagePool("token page", memory.num_token_pages)
        self.slot_pool = PagePool("state slot", memory.num_state_slots)
        pools = (self.token_pool, self.window_pool, self.slot_pool)
        self.prefix = PrefixCache(*pools, page_tokens=self.page_tokens) if prefix_caching else None
        self.restores: list[tuple[int, int]] = []
        self._paged = (
            (self.window_pool, self.table.window, self.table.window_end),
            (self.token_pool, self.table.tokens, self.table.token_end),
        )

    # ---- admission ----------------------------------------------------------------------------------------------

    def open(self, request: Request, *, reserved_token_pages: int) -> bool:
        """Gives a request a row, a state slot and the pages of its known prefix, if all its tokens can follow.

        A request that resumes adds a copy of state slots to `restores`.

        Args:
            request: Waiting, with all its tokens known.
            reserved_token_pages: Token pages that must stay reachable beyond the request's own.

        Returns:
            False, with nothing changed but evictions, if it does not fit now.
        """
        match = Match(None, None)
        if self.prefix is not None and not request.scores_prompt:
            match = self.prefix.match(request.prefix_keys(self.page_tokens), request.num_tokens)
        attempts = (match, match._replace(resume=None)) if match.resume is not None else (match,)
        for attempt in attempts:
            if self._hold_match(attempt, request.num_tokens, reserved_token_pages):
                self._fill_row(request, attempt)
                return True
        return False

    def _hold_match(self, match: Match, num_tokens: int, reserved_token_pages: int) -> bool:
        """Shares what a match gives if the rest of the tokens can follow and a slot can be freed."""
        node = match.resume
        missing = -(-num_tokens // self.page_tokens) - (node.depth if node is not None else 0)
        if self.token_pool.num_reachable < missing + reserved_token_pages:
            return False  # before thousands of pages are shared for nothing
        if node is not None:
            self.token_pool.share(node.pages)
            self.window_pool.share(node.window_pages)
            self.slot_pool.share((node.slot,))
        fits = (
            self.token_pool.num_reachable >= missing + reserved_token_pages
            and self.window_pool.num_reachable >= 1
            and self._free_slot()
        )
        if not fits and node is not None:
            self.token_pool.release(node.pages)
            self.window_pool.release(node.window_pages)
            self.slot_pool.release((node.slot,))
        return fits

    def _fill_row(self, request: Request, match: Match) -> None:
        table, node = self.table, match.resume
        row = table.open(request)
        (slot,) = self.slot_pool.allocate(1)
        table.state_slots[row] = slot
        boundary = 0
        if node is not None:
            boundary = node.depth * self.page_tokens
            table.tokens.set_span(row, 0, node.pages)
            table.window_end[row] = boundary // self.window_rows
            table.window_start[row] = table.window_end[row] - len(node.window_pages)
            table.window.set_span(row, table.window_start[row], node.window_pages)
            table.token_end[row] = node.depth
            self.restores.append((node.slot, slot))
        table.computed[row] = boundary
        request.node = request.resumed_at = node
        request.moving = None
        request.prefill_end = request.num_tokens
        request.stops = []
        if self.prefix is not None:
            self.prefix.count_lookup(request.prefix_keys(self.page_tokens), request.num_tokens, node)
            known = match.known.depth * self.page_tokens if match.known is not None else 0
            last = (request.num_tokens - 1) // self.page_tokens * self.page_tokens
            request.stops = sorted({stop for stop in (known, last) if stop > boundary})

    def _free_slot(self) -> bool:
        return self.slot_pool.num_free > 0 or (self.prefix is not None and self.prefix.free_slots(1))

    def take_restores(self) -> list[tuple[int, int]]:
        """The copies of state slots (source, target) that the next step has to begin with."""
        restores, self.restores = self.restores, []
        return restores

    def end_restores(self, restores: list[tuple[int, int]]) -> None:
        """Lets go of the sources of copies that have been launched."""
        self.slot_pool.release(source for source, _ in restores)

    # ---- pages of a prefill chunk -------------------------------------------------------------------------------

    def expire(self, row: int, position: int) -> None:
        """Frees the window pages that no query from `position` on can see."""
        table = self.table
        start, stop = table.window_start[row], max(position - self.window + 1, 0) // self.window_rows
        if stop > start:
            self.window_pool.release(table.window.clear_span(row, start, stop))
            table.window_start[row] = stop

    def reachable_end(self, row: int, end: int) -> int:
        """How far up to `end` the row's pages can grow, eviction included."""
        table = self.table
        window_end = (table.window_end[row] + self.window_pool.num_reachable) * self.window_rows
        token_end = (table.token_end[row] + self.token_pool.num_reachable) * self.page_tokens
        return min(end, window_end, token_end)

    def extend(self, row: int, end: int) -> None:
        """Gives a row the pages of all positions before `end`, which `reachable_end` has allowed."""
        for pool, pages, ends in self._paged:
            count = -(-end // pages.unit) - ends[row]
            if count > 0:
                self._make_room(pool, count)
                pages.set_span(row, ends[row], pool.allocate(count))
                ends[row] += count

    def _make_room(self, pool: PagePool, count: int) -> bool:
        """Evicts until a pool has this many free pages; False without any change if that cannot be."""
        if pool.num_free >= count:
            return True
        if self.prefix is None or pool.num_reachable < count:
            return False
        free = self.prefix.free_window_pages if pool is self.window_pool else self.prefix.free_token_pages
        return free(count)

    # ---- pages of a decode step ---------------------------------------------------------------------------------

    def extend_decode(self, rows: NDArray[np.int32]) -> bool:
        """Gives each row the pages of its next position, after freeing what left the window.

        Returns:
            False, with nothing allocated, if they cannot be had for all of these rows.
        """
        table = self.table
        due: list[int] = rows[table.computed[rows] >= table.next_change[rows]].tolist()
        if not due:
            return True
        positions: list[int] = table.computed[due].tolist()
        for row, position in zip(due, positions, strict=True):
            self.expire(row, position)
        late = [
            [row for row, position in zip(due, positions, strict=True) if position >= ends[row] * pages.unit]
            for _, pages, ends in self._paged
        ]
        if not all(self._make_room(pool, len(late[i])) for i, (pool, _, _) in enumerate(self._paged)):
            return False
        for (pool, pages, ends), late_rows in zip(self._paged, late, strict=True):
            for row, page in zip(late_rows, pool.allocate(len(late_rows)), strict=True):
                pages.set(row, ends[row], page)
                ends[row] += 1
        for row in due:
            more = min(table.window_end[row] * self.window_rows, table.token_end[row] * self.page_tokens)
            table.next_change[row] = min(more, (table.window_start[row] + 1) * self.window_rows + self.window - 1)
        return True

    # ---- resume points ------------------------------------------------------------------------------------------

    def remember(self, request: Request, boundary: int) -> tuple[int, int] | None:
        """Makes a page boundary that a request has just reached a resume point.

        Boundaries that a prefill had to stop at stay until they are evicted. Others follow the request: the one before
        is given up unless somebody resumed there.

        Returns:
            State slots to copy (source, target) before the next step, or None if nothing was stored.
        """
        prefix, row, depth = self.prefix, request.row, boundary // self.page_tokens
        window_pages = self._window_before(row, boundary)
        if prefix is None or window_pages is None:
            return None
        node = self._known_path(request, depth)
        if node is not None and node.depth == depth and node.is_resume_point:
            return None
        old = request.moving if request.moving is not None and request.moving.can_move else None
        if old is None and self.slot_pool.num_free == 0:
            if not prefix.free_slots(1):
                return None
            node = self._known_path(request, depth)  # what was given up may have taken a part of the path along
        pages: list[int] = self.table.tokens.pages[row, :depth].tolist()
        first = node.depth if node is not None else 0
        keys = request.prefix_keys(self.page_tokens)[first:depth]
        end = prefix.extend(node, keys, pages[first:])
        assert end is not None, "a boundary lies behind at least one page"
        if old is not None:
            prefix.forget_resume_point(old)  # only now: something lies behind it, so its pages stay
        (slot,) = self.slot_pool.allocate(1)
        prefix.make_resume_point(end, pages, window_pages, slot)
        if keys:
            request.made.append(end.ancestor(first + 1))
        request.node = end
        request.moving = None if boundary in request.stops else end
        return int(self.table.state_slots[row]), slot

    def _window_before(self, row: int, boundary: int) -> list[int] | None:
        """Pages of the window before a boundary; None if one is gone."""
        first = max(boundary - self.window + 1, 0) // self.window_rows
        if first < self.table.window_start[row]:
            return None
        pages: list[int] = self.table.window.pages[row, first : boundary // self.window_rows].tolist()
        return pages if min(pages, default=0) >= 0 else None

    def _known_path(self, request: Request, depth: int) -> Node | None:
        """Follows the tree along a request, at most to a depth, and takes over the tree's pages for its own copies.

        Afterwards a request that holds the page of a node holds those of all its ancestors too, so whatever the tree
        alone holds can be evicted.
        """
        assert self.prefix is not None
        node = request.node if request.node is not None and request.node.is_attached else None
        start = node.depth if node is not None else 0
        path = self.prefix.walk(request.prefix_keys(self.page_tokens)[start:depth])
        for at in path:
            own = int(self.table.tokens.pages[request.row, at.depth - 1])
            if own != at.page:
                self.token_pool.share((at.page,))
                self.token_pool.release((own,))
                self.table.tokens.set(request.row, at.depth - 1, at.page)
        request.node = path[-1] if path else node
        return request.node

    def discard(self, request: Request) -> None:
        """Removes from the tree whatever a request put there or resumed from: its rows turned out bad."""
        if self.prefix is None:
            return
        for node in (*request.made, *((request.resumed_at,) if request.resumed_at is not None else ())):
            self.prefix.discard(node)
        request.made.clear()

    # ---- the end of a row ---------------------------------------------------------------------------------------

    def close(self, request: Request) -> None:
        """Takes everything away from a row. What the prefix tree holds too stays there."""
        table, row = self.table, request.row
        self.window_pool.release(table.window.clear_span(row, table.window_start[row], table.window_end[row]))
        self.token_pool.release(table.tokens.clear_span(row, 0, table.token_end[row]))
        slot = int(table.state_slots[row])
        for restore in [restore for restore in self.restores if restore[1] == slot]:
            self.restores.remove(restore)  # admitted and preempted in one step
            self.end_restores([restore])
        self.slot_pool.release((slot,))
        table.close(row)

    def usage(self) -> CacheUsage:
        """Pages and slots now."""
        split = [
            (pool.size - pool.num_reachable, pool.num_only_cached, pool.num_free)
            for pool in (self.window_pool, self.token_pool, self.slot_pool)
        ]
        return CacheUsage(window_pages=split[0], token_pages=split[1], state_slots=split[2])

    def check(self) -> None:
        """Compares all counts, for tests and the idle check.

        Raises:
            AssertionError: If pages or slots are lost or counted twice.
        """
        for pool in (self.window_pool, self.token_pool, self.slot_pool):
            pool.check()
        if self.table.num_free == self.table.num_rows:
            for pool in (self.window_pool, self.token_pool, self.slot_pool):
                assert pool.num_reachable == pool.size, f"a {pool.name} is held although nothing runs"
