"""Prefix cache: a tree over token ids in units of a token page, with points at which a request can resume.

A node stands for one full page of tokens and holds the token page with their compressed rows and index keys. That is
not enough to go on from its end: a request also needs the window rows before that boundary and the compressor state
there. A node that holds these too is a *resume point*. Every leaf is one, so no page in the tree is useless; a node
that stops being one and has no children leaves the tree.

Children are found by the bytes of their tokens, so two texts can never be taken for each other, and a look-up costs
one hash of the prompt whatever else is stored. Prompts with other extra keys (a salt, an adapter) live in other trees.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from halocline.engine.page_pool import PagePool

__all__ = ["CacheCounters", "ExtraKeys", "Match", "Node", "PrefixCache"]

logger = logging.getLogger(__name__)

ExtraKeys = tuple[tuple[str, str], ...]
"""Pairs of kind and value, sorted; equal values of different kinds are different keys."""

_SUSPICIOUS_REPEATS = 16
_REMEMBERED_STARTS = 4096


class Node:
    """One full page of tokens behind its parent's.

    Attributes:
        parent: None for the root of a tree and for a node that has left it.
        key: Bytes of its int32 tokens.
        page: Token page; -1 for a root.
        depth: Pages from the root, this one included.
        children: By the bytes of their tokens.
        window_pages: Window pages that cover the window before the boundary, if this is a resume point.
        slot: State slot with the compressor state at the boundary, if this is a resume point; else -1.
        num_hits: Requests that resumed here.
        extra_keys: Of a root, what its prompts share.
    """

    __slots__ = ("children", "depth", "extra_keys", "key", "num_hits", "page", "parent", "slot", "window_pages")

    def __init__(self, parent: Node | None, key: bytes, page: int, depth: int, extra_keys: ExtraKeys = ()) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.window_pages: tuple[int, ...] = ()
        self.slot = -1
        self.num_hits = 0
        self.extra_keys = extra_keys

    @property
    def is_resume_point(self) -> bool:
        """Whether a request can go on from this node's boundary."""
        return self.slot >= 0

    @property
    def can_move(self) -> bool:
        """Whether a request that made this resume point may give it up for a later one: nobody else used it."""
        return self.slot >= 0 and self.num_hits == 0

    @property
    def is_attached(self) -> bool:
        """Whether it is still in a tree (roots are)."""
        return self.parent is not None or self.depth == 0


class Match(NamedTuple):
    """What the tree knows of a prompt.

    Attributes:
        pages: Token pages of the prefix up to the resume point; empty when there is none.
        resume: Deepest resume point on the prompt's path, or None.
        known: Deepest node on the path; where it lies behind `resume`, earlier prompts shared these tokens too.
    """

    pages: list[int]
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
        evicted_pages: Token pages that left the tree with them.
    """

    lookups: int = 0
    hits: int = 0
    looked_up_tokens: int = 0
    cached_tokens: int = 0
    inserts: int = 0
    evictions: int = 0
    evicted_pages: int = 0


class PrefixCache:
    """The trees, and the order in which resume points are given up: least recently used first, leaves before stems."""

    def __init__(self, token_pool: PagePool, window_pool: PagePool, slot_pool: PagePool, *, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.counters = CacheCounters()
        self._token_pool = token_pool
        self._window_pool = window_pool
        self._slot_pool = slot_pool
        self._roots: dict[ExtraKeys, Node] = {}
        # Oldest use first. A use touches the node and then its ancestors, so none of these is older than a descendant.
        self._resume_points: OrderedDict[Node, None] = OrderedDict()
        self._starts: OrderedDict[int, None] = OrderedDict()
        self._repeats = 0

    @property
    def num_resume_points(self) -> int:
        """Resume points stored."""
        return len(self._resume_points)

    # ---- look-up ------------------------------------------------------------------------------------------------

    def match(self, tokens: NDArray[np.int32], extra_keys: ExtraKeys = ()) -> Match:
        """Finds how far a prompt is known. At least its last token is left to compute.

        The caller must share the pages and the slot before it does anything else with the cache.

        Args:
            tokens: All tokens of the prompt.
            extra_keys: What else must be equal.
        """
        size = 4 * self.page_tokens
        end = (len(tokens) - 1) // self.page_tokens * size
        node = self._roots.get(extra_keys)
        if node is None or end == 0:
            return Match([], None, None)
        root, resume, pages = node, None, []
        data = tokens[: end // 4].tobytes()
        for start in range(0, end, size):
            child = node.children.get(data[start : start + size])
            if child is None:
                break
            node = child
            pages.append(node.page)
            if node.slot >= 0:
                resume = node
        del pages[resume.depth if resume is not None else 0 :]
        return Match(pages, resume, node if node is not root else None)

    def count_lookup(self, tokens: NDArray[np.int32], extra_keys: ExtraKeys, resume: Node | None) -> None:
        """Counts an admitted prompt, and warns once if repeated prompts never hit."""
        counters = self.counters
        counters.lookups += 1
        counters.looked_up_tokens += len(tokens)
        if resume is not None:
            counters.hits += 1
            counters.cached_tokens += resume.depth * self.page_tokens
            resume.num_hits += 1
            self._touch(resume)
        if counters.hits or len(tokens) <= self.page_tokens:
            return
        start = hash((extra_keys, tokens[: self.page_tokens].tobytes()))
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
                counters.lookups,
                counters.inserts,
                counters.evictions,
            )

    # ---- insertion ----------------------------------------------------------------------------------------------

    def walk(self, node: Node | None, blocks: Sequence[bytes], extra_keys: ExtraKeys = ()) -> list[Node]:
        """Follows known pages from a node (None: the root), as far as they are in the tree."""
        at = node if node is not None else self._roots.get(extra_keys)
        path: list[Node] = []
        for block in blocks:
            at = at.children.get(block) if at is not None else None
            if at is None:
                break
            path.append(at)
        return path

    def extend(self, node: Node | None, blocks: Sequence[bytes], pages: Sequence[int], extra_keys: ExtraKeys) -> Node:
        """Adds pages of a request behind a node (None: the root) and returns the last one, not yet a resume point."""
        if node is None:
            node = self._roots.get(extra_keys)
        if node is None:
            node = self._roots[extra_keys] = Node(None, b"", -1, 0, extra_keys)
        self._token_pool.hold_for_cache(pages)
        for block, page in zip(blocks, pages, strict=True):
            assert block not in node.children, "a known page is inserted again"
            child = Node(node, block, page, node.depth + 1)
            node.children[block] = child
            node = child
        return node

    def make_resume_point(self, node: Node, window_pages: Sequence[int], slot: int) -> None:
        """Lets requests resume at a node.

        Args:
            node: Any node but a root.
            window_pages: Pages of the window before its boundary, shared with the request that computed them.
            slot: State slot that now belongs to the tree.
        """
        assert not node.is_resume_point, "a resume point is made once"
        self._window_pool.hold_for_cache(window_pages)
        self._slot_pool.hold_for_cache((slot,))
        self._slot_pool.release((slot,))
        node.window_pages, node.slot = tuple(window_pages), slot
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
        if pool.num_reachable < count:
            return False
        while pool.num_free < count:
            leaf = self._oldest(lambda node: not node.children and pool.owners(node.page) == 1)
            if leaf is None:
                return False
            self._evict(leaf)
        return True

    def free_window_pages(self, count: int) -> bool:
        """Evicts until `count` window pages are free. Evicts nothing if that cannot be reached."""
        pool = self._window_pool
        if pool.num_reachable < count:
            return False
        while pool.num_free < count:
            node = self._oldest(lambda node: any(pool.owners(page) == 1 for page in node.window_pages))
            if node is None:
                return False
            self._evict(node)
        return True

    def free_slots(self, count: int) -> bool:
        """Evicts until `count` state slots are free. Evicts nothing if that cannot be reached."""
        pool = self._slot_pool
        if pool.num_reachable < count:
            return False
        while pool.num_free < count:
            node = self._oldest(lambda node: pool.owners(node.slot) == 1)
            if node is None:
                return False
            self._evict(node)
        return True

    def _oldest(self, suits: Callable[[Node], bool]) -> Node | None:
        return next((node for node in self._resume_points if suits(node)), None)

    def _evict(self, node: Node) -> None:
        self.counters.evictions += 1
        before = self._token_pool.num_free
        self.forget_resume_point(node)
        self.counters.evicted_pages += self._token_pool.num_free - before

    def forget_resume_point(self, node: Node) -> None:
        """Makes a node an interior one; it and what only led to it leave the tree if nothing lies behind them."""
        del self._resume_points[node]
        self._window_pool.drop_from_cache(node.window_pages)
        self._slot_pool.drop_from_cache((node.slot,))
        node.window_pages, node.slot = (), -1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Removes a node and those before it while nothing lies behind them and nobody can resume there."""
        at = node
        while at.parent is not None and not at.children and not at.is_resume_point:
            parent = at.parent
            del parent.children[at.key]
            self._token_pool.drop_from_cache((at.page,))
            at.parent = None
            at = parent
        if at.parent is None and not at.children:
            self._roots.pop(at.extra_keys, None)

    def discard(self, node: Node) -> None:
        """Removes a node and everything behind it, for rows that turned out bad."""
        if node.parent is None:
            return
        below = [node]
        for at in below:
            below.extend(at.children.values())
        # Leaves are resume points; forgetting them from the deepest up removes the interior nodes with them, and
        # stops at a node above that is needed otherwise.
        for at in sorted(below, key=lambda at: -at.depth):
            if at.is_resume_point:
                self.forget_resume_point(at)

    def clear(self) -> None:
        """Removes everything."""
        for node in list(self._resume_points):
            if node.is_resume_point:
                self.forget_resume_point(node)

    def nodes(self) -> list[Node]:
        """Every node but the roots, parents first; for tests and reports."""
        found = [child for root in self._roots.values() for child in root.children.values()]
        for node in found:
            found.extend(node.children.values())
        return found
