"""What an engine says of itself: counts that add up, and whether it is well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halocline.engine.request import Phase

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]


def test_counts_add_up(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench(prefix_caching=False, overlap=False)
    for length in (30, 50, 70):
        bench.add(prompt_of(length), max_tokens=10)
    bench.engine.step()
    assert (bench.engine.stats().unfinished, bench.engine.stats().running) == (3, 2)
    bench.engine.run()
    stats = bench.engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.finished) == (150, 27, {"length": 3})
    assert (stats.unfinished, stats.running, stats.lookups) == (0, 0, 0)
    used, cached, free = stats.cache.token_pages
    assert (used, cached, free) == (0, 0, bench.engine.memory.num_token_pages)


def test_ill_when_steps_fail_one_after_the_other(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench()
    bench.model.broken = True
    for seed in range(3):
        assert bench.engine.health().ok
        bench.add(prompt_of(10, seed), max_tokens=2)
        bench.engine.run()
    health = bench.engine.health()
    assert (health.ok, health.problem) == (False, "the last 3 steps failed")
    bench.model.broken = False
    bench.generate(prompt_of(10), max_tokens=2)
    assert bench.engine.health().ok


def test_ill_when_stuck_and_well_when_idle(make_bench: Make, prompt_of: Prompt) -> None:
    time = [0.0]
    bench = make_bench(clock=lambda: time[0])
    time[0] = 1000.0
    assert bench.engine.health().ok, "nothing to do is no fault"
    request = bench.add(prompt_of(10), max_tokens=50)
    assert bench.engine.health().ok
    bench.engine.step()
    time[0] += 61.0
    health = bench.engine.health()
    assert (health.ok, health.problem) == (False, "1 requests, no step for 61 s")
    bench.engine.step()
    assert bench.engine.health().ok
    assert request.phase is Phase.DECODE
