"""Prefix cache: a tree of token pages, with points at which a request can resume.

A node stands for one full page of tokens behind its parent's and holds the token page with their compressed rows and
index keys. That is not enough to go on from its end: a request also needs the window rows before that boundary and the
compressor state there. A node that holds these too is a *resume point*. Every leaf is one, so no page in the tree is
useless; a node that stops being one and has no children leaves the tree.

Nodes are found by the key of their boundary (`prefix_keys`). If a boundary is known, all boundaries before it are, so
the deepest known one is found by bisection: a look-up costs a handful of probes, whatever else is stored.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from halocline.engine.page_pool import PagePool

__all__ = ["CacheCounters", "Match", "Node", "PrefixCache"]

logger = logging.getLogger(__name__)

_SUSPICIOUS_REPEATS = 16
_REMEMBERED_STARTS = 4096


class Node:
    """One full page of tokens behind its parent's.

    Attributes:
        parent: None for the first page of a text.
        key: Key of the boundary at its end.
        page: Token page.
        depth: Pages from the beginning, this one included.
        num_children: Known pages right behind it.
        is_attached: Whether it is in the tree.
        window_pages: Of a resume point, the window pages before its boundary.
        slot: Of a resume point, the state slot with the compressor state at its boundary; else -1.
        pages: Of a resume point, all token pages up to its boundary.
        num_hits: Requests that resumed here.
    """

    __slots__ = (
        "depth",
        "is_attached",
        "key",
        "num_children",
        "num_hits",
        "page",
        "pages",
        "parent",
        "slot",
        "window_pages",
    )

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.num_children = 0
        self.is_attached = True
        self.window_pages: tuple[int, ...] = ()
        self.slot = -1
        self.pages: tuple[int, ...] = ()
        self.num_hits = 0

    @property
    def is_resume_point(self) -> bool:
        """Whether a request can go on from this node's boundary."""
        return self.slot >= 0

    @property
    def can_move(self) -> bool:
        """Whether a request that made this resume point may give it up for a later one: nobody else used it."""
        return self.slot >= 0 and self.num_hits == 0

    def ancestor(self, depth: int) -> Node:
        """The node of this depth on the way from the beginning."""
        node = self
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node


class Match(NamedTuple):
    """What the tree knows of a prompt.

    Attributes:
        resume: Deepest resume point on the prompt's path, or None.
        known: Deepest node on the path; where it lies behind `resume`, earlier prompts shared these tokens too.
    """

    resume: Node | None
    known: Node | None


@dataclass(kw_only=True)
class CacheCounters:
    """What happened since start.

    Attributes:
        lookups: Prompts looked up.
        hits: Of these, prompts that resumed.
        looked_up_tokens: Tokens of all prompts.
        cached_tokens: Of these, tokens that did not have to be computed.
        inserts: Resume points stored.
        evictions: Resume points given up to make room.
        evicted_pages: Token pages that became free with them.
    """

    lookups: int = 0
    hits: int = 0
    looked_up_tokens: int = 0
    cached_tokens: int = 0
    inserts: int = 0
    evictions: int = 0
    evicted_pages: int = 0


class PrefixCache:
    """The tree, and the order in which resume points are given up: least recently used first, leaves before stems."""

    def __init__(self, token_pool: PagePool, window_pool: PagePool, slot_pool: PagePool, *, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.counters = CacheCounters()
        self._token_pool = token_pool
        self._window_pool = window_pool
        self._slot_pool = slot_pool
        self._nodes: dict[bytes, Node] = {}
        # Oldest use first. A use touches the node and then its ancestors, so none of these is older than a descendant.
        self._resume_points: OrderedDict[Node, None] = OrderedDict()
        self._starts: OrderedDict[bytes, None] = OrderedDict()
        self._repeats = 0

    @property
    def num_resume_points(self) -> int:
        """Resume points stored."""
        return len(self._resume_points)

    # ---- look-up ------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], num_tokens: int) -> Match:
        """Finds how far a prompt is known. At least its last token is left to compute.

        The caller must share the pages and the slot before it does anything else with the cache.

        Args:
            keys: Keys of the prompt's boundaries.
            num_tokens: Its length.
        """
        nodes = self._nodes
        low, high = 0, min(len(keys), (num_tokens - 1) // self.page_tokens)
        while low < high:  # the first `low` boundaries are known, those behind `high` are not
            middle = (low + high + 1) // 2
            if keys[middle - 1] in nodes:
                low = middle
            else:
                high = middle - 1
        known = nodes[keys[low - 1]] if low else None
        resume = known
        while resume is not None and resume.slot < 0:
            resume = resume.parent
        return Match(resume, known)

    def count_lookup(self, keys: Sequence[bytes], num_tokens: int, resume: Node | None) -> None:
        """Counts an admitted prompt, and warns once if repeated prompts never hit."""
        counters = self.counters
        counters.lookups += 1
        counters.looked_up_tokens += num_tokens
        if resume is not None:
            counters.hits += 1
            counters.cached_tokens += resume.depth * self.page_tokens
            resume.num_hits += 1
            self._touch(resume)
        elif not counters.hits and num_tokens > self.page_tokens:
            self._notice_repeat(keys[0])

    def _notice_repeat(self, start: bytes) -> None:
        if start not in self._starts:
            self._starts[start] = None
            if len(self._starts) > _REMEMBERED_STARTS:
                self._starts.popitem(last=False)
            return
        self._repeats += 1
        if self._repeats == _SUSPICIOUS_REPEATS:
            logger.warning(
                "the prefix cache has never hit although %d prompts began like an earlier one: "
                "%d lookups, %d resume points stored, %d evicted; the cache is too small or something is wrong",
                self._repeats,
                self.counters.lookups,
                self.counters.inserts,
                self.counters.evictions,
            )

    # ---- insertion ----------------------------------------------------------------------------------------------

    def walk(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of consecutive boundaries, as far as they are known."""
        path: list[Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def extend(self, node: Node | None, keys: Sequence[bytes], pages: Sequence[int]) -> Node | None:
        """Adds pages of a request behind a node (None: the beginning); the last one must become a resume point."""
        self._token_pool.hold_for_cache(pages)
        for key, page in zip(keys, pages, strict=True):
            assert key not in self._nodes, "a known page is inserted again"
            if node is not None:
                node.num_children += 1
            node = self._nodes[key] = Node(node, key, page)
        return node

    def make_resume_point(self, node: Node, pages: Sequence[int], window_pages: Sequence[int], slot: int) -> None:
        """Lets requests resume at a node.

        Args:
            node: In the tree.
            pages: Token pages of all nodes up to it.
            window_pages: Pages of the window before its boundary, shared with the request that computed them.
            slot: State slot that now belongs to the tree.
        """
        assert node.is_attached, "a resume point is in the tree"
        assert not node.is_resume_point, "a resume point is made once"
        self._window_pool.hold_for_cache(window_pages)
        self._slot_pool.hold_for_cache((slot,))
        self._slot_pool.release((slot,))
        node.pages, node.window_pages, node.slot = tuple(pages), tuple(window_pages), slot
        self._resume_points[node] = None
        self.counters.inserts += 1
        self._touch(node)

    def _touch(self, node: Node) -> None:
        """Makes a node the most recently used but for its ancestors."""
        at: Node | None = node
        while at is not None:
            if at.slot >= 0:
                self._resume_points.move_to_end(at)
            at = at.parent

    # ---- eviction -----------------------------------------------------------------------------------------------

    def free_token_pages(self, count: int) -> bool:
        """Evicts until `count` token pages are free. Evicts nothing if that cannot be reached."""
        pool = self._token_pool
        return self._free(pool, count, lambda node: not node.num_children and pool.owners(node.page) == 1)

    def free_window_pages(self, count: int) -> bool:
        """Evicts until `count` window pages are free. Evicts nothing if that cannot be reached."""
        pool = self._window_pool
        return self._free(pool, count, lambda node: any(pool.owners(page) == 1 for page in node.window_pages))

    def free_slots(self, count: int) -> bool:
        """Evicts until `count` state slots are free. Evicts nothing if that cannot be reached."""
        pool = self._slot_pool
        return self._free(pool, count, lambda node: pool.owners(node.slot) == 1)

    def _free(self, pool: PagePool, count: int, helps: Callable[[Node], bool]) -> bool:
        """Gives up the oldest resume points that help, one by one: each removes a node, so this ends."""
        if pool.num_reachable < count:
            return False
        while pool.num_free < count:
            victim = next((node for node in self._resume_points if helps(node)), None)
            if victim is None:
                return False
            self.counters.evictions += 1
            before = self._token_pool.num_free
            self.forget_resume_point(victim)
            self.counters.evicted_pages += self._token_pool.num_free - before
        return True

    def forget_resume_point(self, node: Node) -> None:
        """Makes a node an interior one; it and what only led to it leave the tree if nothing lies behind them."""
        del self._resume_points[node]
        self._window_pool.drop_from_cache(node.window_pages)
        self._slot_pool.drop_from_cache((node.slot,))
        node.window_pages, node.slot, node.pages = (), -1, ()
        at: Node | None = node
        while at is not None and not at.num_children and not at.is_resume_point:
            del self._nodes[at.key]
            self._token_pool.drop_from_cache((at.page,))
            at.is_attached = False
            at = at.parent
            if at is not None:
                at.num_children -= 1

    def discard(self, node: Node) -> None:
        """Removes a node and everything behind it, for rows that turned out bad."""
        if not node.is_attached:
            return
        for point in list(self._resume_points):
            if point.is_resume_point and point.depth >= node.depth and point.ancestor(node.depth) is node:
                self.forget_resume_point(point)

    def clear(self) -> None:
        """Removes everything."""
        for node in list(self._resume_points):
            self.forget_resume_point(node)

    def nodes(self) -> list[Node]:
        """Every node; for tests and reports."""
        return list(self._nodes.values())
