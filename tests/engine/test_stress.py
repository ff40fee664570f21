"""Model-based stress: random arrivals, aborts, deadlines, preemptions, evictions and reuse over 20,000 steps.

The fake model checks every row that is read; the oracle knows every token; a second count of all pages, taken from the
page tables and the prefix tree, is compared with the pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from halocline.engine.request import Request

STEPS = 20_000
MOST_LIVE = 14
LONGEST_STAY = 700


class Stress:
    def __init__(self, bench: Any, oracle: Callable[[Sequence[int], int], list[int]], seed: int) -> None:
        self.bench = bench
        self.engine = bench.engine
        self.oracle = oracle
        self.random = np.random.default_rng(seed)
        self.now = 0.0
        self.live: dict[Request, int] = {}
        self.texts = [self.random.integers(0, bench.model.vocab_size, 200).tolist() for _ in range(4)]
        self.ends: Counter[str] = Counter()

    def clock(self) -> float:
        return self.now

    def some_prompt(self) -> list[int]:
        """A beginning of a known text (often a past answer) with an end of its own."""
        text = self.texts[self.random.integers(len(self.texts))]
        kept = text[: self.random.integers(1, len(text))]
        tail = self.random.integers(0, self.bench.model.vocab_size, self.random.integers(0, 30)).tolist()
        return [*kept, *tail]

    def add(self, step: int) -> None:
        long_answers = step // 500 % 2 == 1
        least, most = (60, 120) if long_answers else (1, 30)
        options: dict[str, Any] = {"max_tokens": int(self.random.integers(least, most))}
        if self.random.random() < 0.1:
            options["priority"] = int(self.random.integers(-1, 3))
        if self.random.random() < 0.05:
            options["deadline"] = self.now + float(self.random.integers(1, 60))
        if self.random.random() < 0.2:
            options["extra_keys"] = (("salt", "a"),)
        prompt = self.some_prompt()[: 40 if long_answers else 190]
        leader = self.bench.add(prompt, **options)
        self.live[leader] = step
        if self.random.random() < 0.1:
            self.live[self.bench.add(prompt, leader=leader, **options)] = step

    def act(self, step: int) -> None:
        self.now += 1.0
        while len(self.live) < MOST_LIVE and self.random.random() < 0.25:
            self.add(step)
        if self.live and self.random.random() < 0.02:
            self.engine.abort(list(self.live)[self.random.integers(len(self.live))])
        self.engine.step()
        for request in [request for request in self.live if request.is_finished]:
            del self.live[request]
            self.judge(request)

    def judge(self, request: Request) -> None:
        prompt, output = request.admitted.prompt_ids, request.output_ids
        self.ends[request.finish_reason or ""] += 1
        assert request.finish_reason in ("length", "abort"), request.error
        assert output == self.oracle(prompt, len(output)), request
        if request.finish_reason == "length":
            assert len(output) == request.admitted.max_tokens
            if self.random.random() < 0.3 and len(prompt) + len(output) < 200:
                self.texts[self.random.integers(len(self.texts))] = [*prompt, *output]

    def count_again(self) -> None:
        """Owners of every page and slot, from page tables and tree alone."""
        cache = self.engine.groups[0].cache
        rows = [request.row for request in cache.table.requests if request is not None]
        nodes = cache.prefix.nodes()
        resume = [node for node in nodes if node.is_resume_point]
        held = {
            cache.window_pool: [*cache.table.window.pages[rows].ravel(), *(p for n in resume for p in n.window_pages)],
            cache.token_pool: [*cache.table.tokens.pages[rows].ravel(), *(node.page for node in nodes)],
            cache.slot_pool: [*cache.table.state_slots[rows], *(node.slot for node in resume)],
        }
        for pool, pages in held.items():
            owners = Counter(int(page) for page in pages if page >= 0)
            assert owners == Counter({page: pool.owners(page) for page in range(pool.size) if pool.owners(page)})
        free_rows = [row for row in range(cache.table.num_rows) if row not in rows]
        assert (cache.table.window.pages[free_rows] == -1).all()
        assert (cache.table.tokens.pages[free_rows] == -1).all()
        assert all(node.num_children or node.is_resume_point for node in nodes), "a leaf is no resume point"


@pytest.mark.parametrize(("seed", "overlap"), [(1, True), (2, False)])
def test_random_traffic_loses_nothing(
    make_bench: Callable[..., Any],
    oracle: Callable[[Sequence[int], int], list[int]],
    seed: int,
    overlap: bool,
) -> None:
    stresses: list[Stress] = []
    bench = make_bench(
        clock=lambda: stresses[0].now if stresses else 0.0,
        overlap=overlap,
        max_requests=6,
        max_positions=256,
        max_token_pages=18,
        max_step_tokens=96,
        num_snapshots=5,
        priority_steps=50,
    )
    stress = Stress(bench, oracle, seed)
    stresses.append(stress)
    cache = bench.engine.groups[0].cache
    for step in range(STEPS // 2):
        stress.act(step)
        for pool in (cache.window_pool, cache.token_pool, cache.slot_pool):
            assert pool.num_free + pool.num_used == pool.size
        if step % 16 == 0:
            stress.count_again()
            cache.check()
        assert all(step - since < LONGEST_STAY for since in stress.live.values()), "a request starves"
    bench.engine.run()
    bench.check()
    stats = bench.engine.stats()
    assert min(stats.preemptions, stats.evictions, stats.hits, stress.ends["abort"]) > 50
    cache.prefix.clear()
    assert bench.all_free()
