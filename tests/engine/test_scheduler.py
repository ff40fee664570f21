"""What a step works on: chunks, budgets, order, admission by pages, preemption, deadlines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from halocline.engine.request import Phase

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]
Oracle = Callable[[Sequence[int], int], list[int]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- chunks and budgets -------------------------------------------------------------------------------------------


def test_steps_mix_decode_and_prefill_within_the_budget(make_bench: Make, prompt_of: Prompt) -> None:
    """Decode tokens come first; a prompt takes what is left of 64 tokens."""
    bench = make_bench(prefix_caching=False, overlap=False)
    bench.add(prompt_of(10), max_tokens=20)
    bench.engine.step()
    bench.add(prompt_of(100), max_tokens=2)
    bench.add(prompt_of(30), max_tokens=2)
    bench.model.batches.clear()
    bench.engine.run()
    assert bench.model.batches[:4] == [(1, 64), (1, 64), (2, 6), (2, 2)]


def test_chunks_end_on_pages_and_where_others_may_resume(make_bench: Make, prompt_of: Prompt) -> None:
    """Budget 80, page 32: chunks of 64 until the last full page, then the rest."""
    bench = make_bench(max_step_tokens=80)
    bench.generate(prompt_of(170), max_tokens=1)
    assert [tokens for _, tokens in bench.model.batches[2:]] == [64, 64, 32, 10]


def test_a_chunk_limit_lets_another_prompt_into_the_step(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench(max_chunk_tokens=16, prefix_caching=False)
    long, short = bench.add(prompt_of(160), max_tokens=1), bench.add(prompt_of(20), max_tokens=1)
    bench.engine.run()
    assert short.finish_time < long.finish_time
    assert [tokens for _, tokens in bench.model.batches[2:4]] == [32, 20]


@pytest.mark.parametrize(("rows", "pages"), [(64, 3), (4, 33)])
def test_a_full_prompt_in_a_small_window_pool(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle, rows: int, pages: int
) -> None:
    """Window pool of 192 rows, page 64, chunk 128, prompt of 400, no reuse: what left the window makes room.

    The same with pages of 4 rows and the 33 of them that a window of 128 can touch.
    """
    bench = make_bench(
        window=128,
        ratios=(4, 128),
        window_page_rows=rows,
        page_tokens=128,
        max_step_tokens=128,
        max_requests=1,
        prefix_caching=False,
        pools={"num_window_pages": pages},
    )
    assert bench.engine.groups[0].cache.window_pool.size * rows in (192, 132)
    assert bench.generate(prompt_of(400), max_tokens=150) == oracle(prompt_of(400), 150)
    assert bench.all_free()


def test_window_pages_stay_within_the_window_as_a_request_grows(make_bench: Make, prompt_of: Prompt) -> None:
    """A window of 24 rows touches at most four pages of 8; the table is empty before and after it."""
    bench = make_bench(prefix_caching=False, overlap=False)
    request = bench.add(prompt_of(100), max_tokens=200)
    cache = bench.engine.groups[0].cache
    while not request.is_finished:
        bench.engine.step()
        if request.phase is Phase.DECODE and len(request.output_ids) > 1:
            position = int(cache.table.computed[request.row])
            live = [i for i, page in enumerate(cache.table.window.pages[request.row]) if page >= 0]
            assert len(live) == cache.window_pool.num_used <= 4
            assert live == list(range(max(0, position - 24) // 8, (position - 1) // 8 + 1))
    assert bench.all_free()


# ---- order --------------------------------------------------------------------------------------------------------


def started(requests: Sequence[Any]) -> list[int]:
    return sorted(range(len(requests)), key=lambda i: requests[i].start_time)


def test_first_come_first_served(make_bench: Make, prompt_of: Prompt) -> None:
    clock = Clock()
    bench = make_bench(max_requests=1, clock=clock)
    requests = [bench.add(prompt_of(20, seed), max_tokens=3) for seed in range(4)]
    while bench.engine.has_work:
        clock.now += 1.0
        bench.engine.step()
    assert started(requests) == [0, 1, 2, 3]


def test_priority_goes_first_but_waits_for_nobody_for_ever(make_bench: Make, prompt_of: Prompt) -> None:
    """One unit is worth 10 steps: it overtakes what came less than 10 steps before, and nothing older."""
    clock = Clock()
    bench = make_bench(max_requests=1, clock=clock, priority_steps=10)
    running = bench.add(prompt_of(20), max_tokens=40)
    old = bench.add(prompt_of(20, 1), max_tokens=2)
    for _ in range(15):
        clock.now += 1.0
        bench.engine.step()
    recent = bench.add(prompt_of(20, 2), max_tokens=2)
    urgent = bench.add(prompt_of(20, 3), max_tokens=2, priority=1)
    later = bench.add(prompt_of(20, 4), max_tokens=2, priority=-1)
    last = bench.add(prompt_of(20, 5), max_tokens=2)
    while bench.engine.has_work:
        clock.now += 1.0
        bench.engine.step()
    assert started([running, old, urgent, recent, last, later]) == [0, 1, 2, 3, 4, 5]


def test_a_stream_of_urgent_requests_starves_nobody(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench(max_requests=2, priority_steps=20)
    patient = bench.add(prompt_of(50), max_tokens=5, priority=-1)
    steps = 0
    while not patient.is_finished:
        if bench.engine.stats().unfinished < 8:
            bench.add(prompt_of(10, steps), max_tokens=3, priority=2)
        bench.engine.step()
        steps += 1
        assert steps < 120, "three units of priority are worth 60 steps, and the rest of the queue a few more"
    assert patient.finish_reason == "length"


def test_a_large_request_at_the_head_is_not_overtaken(make_bench: Make, prompt_of: Prompt) -> None:
    """Small ones behind it would fit, but letting them pass could starve it."""
    clock = Clock()
    bench = make_bench(max_token_pages=10, max_positions=320, prefix_caching=False, clock=clock)
    first = bench.add(prompt_of(200), max_tokens=8)
    large = bench.add(prompt_of(250), max_tokens=8)
    small = bench.add(prompt_of(10), max_tokens=8)
    while bench.engine.has_work:
        clock.now += 1.0
        bench.engine.step()
    assert started([first, large, small]) == [0, 1, 2]
    assert large.start_time > first.first_token_time


# ---- pages run out ------------------------------------------------------------------------------------------------


def test_preemption_takes_the_last_in_order_and_loses_no_token(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle
) -> None:
    bench = make_bench(max_token_pages=8, max_positions=256, prefix_caching=False)
    requests = [bench.add(prompt_of(40, seed), max_tokens=100) for seed in range(3)]
    bench.engine.run()
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions > 0
    for seed, request in enumerate(requests):
        assert request.output_ids == oracle(prompt_of(40, seed), 100)
    assert bench.all_free()


def test_a_preempted_request_resumes_where_its_pages_were_kept(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench(max_token_pages=12, max_positions=256, overlap=False)
    first, second = (bench.add(prompt_of(70, seed), max_tokens=60) for seed in range(2))
    for _ in range(10):
        bench.engine.step()
    before = bench.engine.stats().prefill_tokens
    bench.engine.groups[0].scheduler._preempt(second)
    bench.engine.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert bench.engine.stats().prefill_tokens - before == second.prefill_end - 64, "two pages did not go again"


def test_an_admission_waits_for_pages_of_the_whole_prompt(make_bench: Make, prompt_of: Prompt) -> None:
    """Two prompts of six pages in a pool of ten: the second is not begun before the first has ended."""
    bench = make_bench(max_token_pages=10, max_positions=320, prefix_caching=False)
    first = bench.add(prompt_of(180), max_tokens=2)
    second = bench.add(prompt_of(181), max_tokens=2)
    while second.phase is Phase.WAITING:
        bench.engine.step()
    assert first.is_finished
    bench.engine.run()
    assert bench.engine.stats().preemptions == 0


def test_the_cache_gives_way_to_requests(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    """A pool full of finished prompts: the next one evicts what it needs and finishes."""
    bench = make_bench(max_token_pages=10, max_positions=320)
    for seed in range(6):
        bench.generate(prompt_of(90, seed), max_tokens=2)
    assert bench.engine.groups[0].cache.token_pool.num_free < 9
    assert bench.generate(prompt_of(285), max_tokens=30) == oracle(prompt_of(285), 30)
    assert bench.engine.stats().evictions > 0


def test_without_a_spare_slot_a_hit_falls_back_to_a_cold_start(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle
) -> None:
    """Two slots, one request and one snapshot of its prefix: a second request takes the snapshot's slot."""
    bench = make_bench(max_requests=2, num_snapshots=0)
    first = bench.add(prompt_of(100), max_tokens=60)
    while not first.output_ids:
        bench.engine.step()
    second = bench.add(prompt_of(100), max_tokens=60)
    bench.engine.run()
    assert second.num_cached_tokens == 0
    assert first.output_ids == second.output_ids == oracle(prompt_of(100), 60)


# ---- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(9))
def test_an_abort_at_any_moment_frees_everything(make_bench: Make, prompt_of: Prompt, steps: int) -> None:
    """Waiting, in the middle of a prefill, with a step in flight, while decoding."""
    bench = make_bench(max_requests=2)
    requests = [bench.add(prompt_of(150, seed), max_tokens=30) for seed in range(3)]
    for _ in range(steps):
        bench.engine.step()
    for request in requests:
        bench.engine.abort(request)
        bench.engine.abort(request)
    bench.engine.run()
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert bench.engine.stats().finished == {"abort": 3}
    bench.check()
    bench.engine.groups[0].cache.prefix.clear()
    assert bench.all_free()


def test_a_request_past_its_deadline_ends(make_bench: Make, prompt_of: Prompt) -> None:
    clock = Clock()
    bench = make_bench(max_requests=1, clock=clock)
    running = bench.add(prompt_of(20), max_tokens=500, deadline=30.0)
    waiting = bench.add(prompt_of(20), max_tokens=5, deadline=10.0)
    in_time = bench.add(prompt_of(20), max_tokens=5, deadline=100.0)
    ends = {}
    while bench.engine.has_work:
        clock.now += 1.0
        bench.engine.step()
        for name, request in (("running", running), ("waiting", waiting), ("in time", in_time)):
            if request.is_finished:
                ends.setdefault(name, clock.now)
    assert (ends["running"], ends["waiting"]) == (30.0, 10.0)
    assert [request.finish_reason for request in (running, waiting, in_time)] == ["abort", "abort", "length"]
    assert running.error == "its deadline has passed"
    assert len(running.output_ids) > 20


def test_outputs_of_one_prompt_wait_for_the_first_ones_prefill(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle
) -> None:
    bench = make_bench(max_requests=4)
    leader = bench.add(prompt_of(150), max_tokens=9)
    others = [bench.add(prompt_of(150), leader=leader, max_tokens=9) for _ in range(3)]
    bench.engine.run()
    assert [request.num_cached_tokens for request in (leader, *others)] == [0, 128, 128, 128]
    assert all(request.output_ids == oracle(prompt_of(150), 9) for request in (leader, *others))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_followers_of_a_leader_that_ends_early_still_run(make_bench: Make, prompt_of: Prompt, steps: int) -> None:
    bench = make_bench()
    leader = bench.add(prompt_of(150), max_tokens=9)
    kept, dropped = (bench.add(prompt_of(150), leader=leader, max_tokens=9) for _ in range(2))
    bench.engine.abort(dropped)
    for _ in range(steps):
        bench.engine.step()
    bench.engine.abort(leader)
    bench.engine.run()
    assert (kept.finish_reason, dropped.finish_reason) == ("length", "abort")


def test_a_short_prompt_is_not_held_back_for_a_prefix_that_cannot_be_shared(
    make_bench: Make, prompt_of: Prompt
) -> None:
    bench = make_bench()
    leader = bench.add(prompt_of(20), max_tokens=2)
    follower = bench.add(prompt_of(20), leader=leader, max_tokens=2)
    bench.engine.step()
    assert follower.phase is not Phase.WAITING
