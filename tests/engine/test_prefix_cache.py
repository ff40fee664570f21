"""The prefix tree: what it accepts, what it finds, what it gives up, and that it warns when it never helps."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from halocline.engine.page_pool import PagePool
from halocline.engine.prefix_cache import PrefixCache
from halocline.engine.prefix_keys import PrefixKeys

PAGE = 4


class Tree:
    """A tree with pools of its own; every insertion plays a request that has ended."""

    def __init__(self, token_pages: int = 16, slots: int = 8, window_pages: int = 16) -> None:
        self.tokens = PagePool("token page", token_pages)
        self.window = PagePool("window page", window_pages)
        self.slots = PagePool("state slot", slots)
        self.cache = PrefixCache(self.tokens, self.window, self.slots, page_tokens=PAGE)

    def keys(self, text: Sequence[int], extra: tuple[tuple[str, str], ...] = ()) -> list[bytes]:
        keys = PrefixKeys(PAGE, extra)
        keys.extend(np.array(text, dtype=np.int32))
        return keys.keys

    def insert(
        self, text: Sequence[int], *, running: bool = False, extra: tuple[tuple[str, str], ...] = ()
    ) -> list[int]:
        """Stores all full pages of a text; returns the pages that its request holds."""
        keys = self.keys(text, extra)
        path = self.cache.walk(keys)
        pages = [node.page for node in path]
        self.tokens.share(pages)
        fresh = self.tokens.allocate(len(keys) - len(path))
        (window,), (slot,) = self.window.allocate(1), self.slots.allocate(1)
        end = self.cache.extend(path[-1] if path else None, keys[len(path) :], fresh)
        assert end is not None
        self.cache.make_resume_point(end, [*pages, *fresh], [window], slot)
        self.window.release([window])
        if not running:
            self.tokens.release([*pages, *fresh])

    def cached(self, text: Sequence[int], extra: tuple[tuple[str, str], ...] = ()) -> int:
        """Tokens that a new prompt would find."""
        resume = self.cache.match(self.keys(text, extra), len(text)).resume
        return resume.depth * PAGE if resume is not None else 0

    def check(self) -> None:
        for pool in (self.tokens, self.window, self.slots):
            pool.check()
        assert all(node.num_children or node.is_resume_point for node in self.cache.nodes())


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


# ---- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_is_the_digest_of_everything_before_its_boundary() -> None:
    tokens = np.arange(11, dtype=np.int32)
    keys = PrefixKeys(PAGE)
    keys.extend(tokens)
    data = tokens.astype("<i4").tobytes()
    assert keys.keys == [hashlib.sha256(b"\xff" * 8 + data[: 4 * n]).digest() for n in (4, 8)]
    assert keys.num_tokens == 8


def test_keys_do_not_depend_on_how_a_text_grew() -> None:
    tokens = np.array(text(40), dtype=np.int32)
    whole, grown = PrefixKeys(PAGE), PrefixKeys(PAGE)
    whole.extend(tokens)
    for stop in (3, 9, 10, 27, 40):
        grown.extend(tokens[grown.num_tokens : stop])
    assert grown.keys == whole.keys
    assert len(set(whole.keys)) == 10


def test_extra_keys_are_kept_apart_by_kind() -> None:
    """One text as a salt, as another field, split otherwise, and without: no two agree."""
    kinds: list[tuple[tuple[str, str], ...]] = [
        (("salt", "x"),),
        (("adapter", "x"),),
        (("saltx", ""),),
        (("sal", "tx"),),
        (("adapter", "x"), ("salt", "x")),
        (),
    ]
    tree = Tree()
    assert len({tree.keys(text(4), kind)[0] for kind in kinds}) == len(kinds)
    tree.insert(text(12), extra=kinds[0])
    assert [tree.cached([*text(12), 1], kind) for kind in kinds] == [12, 0, 0, 0, 0, 0]


# ---- look-up ------------------------------------------------------------------------------------------------------


def test_whatever_is_stored_is_found_at_many_lengths() -> None:
    for length in range(PAGE, 12 * PAGE + 3):
        tree = Tree()
        tree.insert(text(length))
        boundary = length // PAGE * PAGE
        assert tree.cached([*text(length)[:boundary], 5]) == boundary
        assert tree.cached(text(length)) == (boundary if boundary < length else 0), "one token is always computed"


def test_another_text_does_not_hit_and_a_shared_beginning_is_known() -> None:
    tree = Tree()
    tree.insert(text(16))
    assert tree.cached(text(16, 1)) == 0
    branch = [*text(16)[:9], *text(20, 2)]
    match = tree.cache.match(tree.keys(branch), len(branch))
    assert match.resume is None
    assert match.known is not None and match.known.depth == 2, "eight tokens are shared, but nobody can resume there"


def test_the_deepest_resume_point_wins() -> None:
    tree = Tree()
    for length in (4, 12, 8):
        tree.insert(text(24)[:length])
    assert tree.cached(text(24)) == 12
    assert tree.cached(text(24)[:12]) == 8


# ---- eviction -----------------------------------------------------------------------------------------------------


def test_pages_are_evicted_by_pages_and_not_by_tokens() -> None:
    """Page 4, three pages needed, one free: exactly two are evicted."""
    tree = Tree(token_pages=6)
    for seed in range(5):
        tree.insert(text(4, seed))
    assert tree.tokens.num_free == 1
    assert tree.cache.free_token_pages(3)
    assert (tree.tokens.num_free, tree.cache.counters.evictions) == (3, 2)
    assert [tree.cached([*text(4, seed), 1]) for seed in range(5)] == [0, 0, 4, 4, 4], "the oldest go first"
    tree.check()


def test_ninety_percent_of_a_full_cache_can_be_freed() -> None:
    tree = Tree(token_pages=40, slots=20, window_pages=20)
    for seed in range(10):
        tree.insert(text(16, seed))
    assert tree.tokens.num_free == 0
    assert tree.cache.free_token_pages(36)
    assert tree.tokens.num_free >= 36
    tree.check()


def test_eviction_that_cannot_reach_its_goal_fails_and_changes_nothing() -> None:
    tree = Tree(token_pages=4)
    tree.insert(text(8, 1), running=True)
    tree.insert(text(8, 2))
    assert not tree.cache.free_token_pages(3)
    assert (tree.cached([*text(8, 2), 1]), tree.cache.counters.evictions) == (8, 0)
    assert tree.cache.free_token_pages(2)
    tree.check()


def test_a_leaf_goes_before_the_stem_that_others_share() -> None:
    tree = Tree(token_pages=4)
    stem = text(8)
    tree.insert(stem)
    tree.insert([*stem, *text(4, 1)])
    tree.insert([*stem, *text(4, 2)])
    assert tree.cache.free_token_pages(1)
    assert [tree.cached([*stem, *tail, 0]) for tail in (text(4, 1), text(4, 2), [])] == [8, 12, 8]
    tree.check()


def test_a_used_prefix_outlives_one_that_is_not() -> None:
    tree = Tree(token_pages=2)
    tree.insert(text(4, 1))
    tree.insert(text(4, 2))
    keys = tree.keys([*text(4, 1), 0])
    tree.cache.count_lookup(keys, 5, tree.cache.match(keys, 5).resume)
    assert tree.cache.free_token_pages(1)
    assert [tree.cached([*text(4, seed), 0]) for seed in (1, 2)] == [4, 0]


@pytest.mark.parametrize("pool", ["window", "slots"])
def test_a_point_without_window_or_state_is_a_way_and_no_stop(pool: str) -> None:
    """A running request holds the leaf's window and state, so the stem has to give up its own: pages stay."""
    tree = Tree(slots=2, window_pages=2)
    stem = text(8)
    tree.insert(stem)
    tree.insert([*stem, *text(4, 1)])
    leaf = tree.cache.walk(tree.keys([*stem, *text(4, 1)]))[-1]
    tree.window.share(leaf.window_pages)
    tree.slots.share([leaf.slot])
    assert not (tree.cache.free_window_pages(2) or tree.cache.free_slots(2))
    assert (tree.cache.free_window_pages if pool == "window" else tree.cache.free_slots)(1)
    assert [tree.cached([*stem, *tail, 7]) for tail in ([], text(4, 1))] == [0, 12]
    assert tree.tokens.num_used == 3
    tree.check()


def test_discarding_takes_everything_behind_a_node_and_nothing_else() -> None:
    tree = Tree()
    stem = text(4)
    tree.insert(stem)
    tree.insert([*stem, *text(8, 1)])
    tree.insert([*stem, *text(8, 2)])
    (node,) = tree.cache.walk(tree.keys([*stem, *text(8, 1)])[1:2])
    tree.cache.discard(node)
    assert [tree.cached([*stem, *tail, 0]) for tail in (text(8, 1), text(8, 2))] == [4, 12]
    tree.check()


def test_clearing_frees_everything() -> None:
    tree = Tree()
    for length in (4, 8, 12, 13):
        tree.insert(text(length, length % 2))
    tree.cache.clear()
    assert not tree.cache.nodes()
    assert all(pool.num_free == pool.size for pool in (tree.tokens, tree.window, tree.slots))


# ---- counting -----------------------------------------------------------------------------------------------------


def test_counters_count_prompts_tokens_and_evictions() -> None:
    tree = Tree(token_pages=4)
    for prompt in (text(9), text(9)):
        keys = tree.keys(prompt)
        tree.cache.count_lookup(keys, len(prompt), tree.cache.match(keys, len(prompt)).resume)
        if not tree.cache.num_resume_points:
            tree.insert(prompt)
    tree.cache.free_token_pages(4)
    counters = tree.cache.counters
    assert (counters.lookups, counters.hits, counters.looked_up_tokens, counters.cached_tokens) == (2, 1, 18, 8)
    assert (counters.inserts, counters.evictions, counters.evicted_pages) == (1, 1, 2)


def test_a_cache_that_never_hits_repeated_text_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    tree = Tree()
    keys = tree.keys(text(9))
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            tree.cache.count_lookup(keys, 9, None)
    (record,) = caplog.records
    assert "never hit although 16 prompts began like an earlier one" in record.getMessage()


def test_new_texts_and_hits_raise_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    tree = Tree(token_pages=64, slots=64, window_pages=64)
    with caplog.at_level(logging.WARNING):
        for seed in range(40):
            tree.cache.count_lookup(tree.keys(text(9, seed)), 9, None)
        tree.insert(text(9))
        keys = tree.keys(text(9))
        for _ in range(40):
            tree.cache.count_lookup(keys, 9, tree.cache.match(keys, 9).resume)
    assert not caplog.records


# ---- through the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(600, 512), (2000, 1792), (256, 0), (257, 256), (513, 512), (512, 256)])
def test_repeated_prompts_follow_the_stated_rule(
    make_bench: Callable[..., Any], prompt_of: Callable[[int], list[int]], length: int, cached: int
) -> None:
    """Pages of 256: a repeated prompt finds all its full pages but the one that would leave nothing to compute."""
    bench = make_bench(page_tokens=256, max_positions=4096, window=128, ratios=(4, 128), window_page_rows=64)
    bench.model.max_positions = 4096
    first = bench.generate(prompt_of(length), max_tokens=2)
    again = bench.add(prompt_of(length), max_tokens=2)
    bench.engine.run()
    assert (again.num_cached_tokens, again.output_ids) == (cached, first)


def test_one_prompt_three_times(
    make_bench: Callable[..., Any], prompt_of: Callable[[int], list[int]], oracle: Callable[..., list[int]]
) -> None:
    """700 tokens, greedy: three equal answers, whatever of window, state, keys and rows came from the cache."""
    bench = make_bench(max_positions=1024)
    assert [bench.generate(prompt_of(700), max_tokens=30) for _ in range(3)] == [oracle(prompt_of(700), 30)] * 3
    assert bench.engine.stats().hits == 2
