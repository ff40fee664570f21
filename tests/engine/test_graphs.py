"""Captured decode steps, on the stand-in that runs again: padding, sizes, refreshed buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from halocline.engine.graphs import DecodeGraphs, RerunCapture
from halocline.hal.errors import ConfigError

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]
Oracle = Callable[[Sequence[int], int], list[int]]


def test_the_smallest_recording_that_holds_a_batch_is_used() -> None:
    graphs = DecodeGraphs((8, 2, 4))
    assert graphs.size_for(1) is None, "nothing is recorded yet"
    runs: list[int] = []
    graphs.record(RerunCapture(), lambda size: lambda: runs.append(size))
    assert runs == [8, 8, 4, 4, 2, 2], "the largest first; each runs once before it is recorded"
    assert [graphs.size_for(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8, None]
    graphs.replay(4)
    assert runs[-1] == 4


def test_recordings_that_were_let_go_are_not_used() -> None:
    """They hold collectives, and a group's library waits for them before it ends."""
    held: list[weakref.ref[RerunCapture]] = []

    class Capture(RerunCapture):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            recording = RerunCapture()
            held.append(weakref.ref(recording))
            return lambda: recording.capture(run) and None

    graphs = DecodeGraphs((1, 2))
    graphs.record(Capture(), lambda size: lambda: None)
    assert all(one() is not None for one in held)
    graphs.clear()
    assert graphs.size_for(1) is None
    assert [one() for one in held] == [None, None]


@pytest.mark.parametrize("size", [32, 33, 64])
def test_recording_on_nothing_but_padding(make_bench: Make, size: int) -> None:
    """All lengths are zero while a graph is recorded."""
    bench = make_bench(max_requests=64, graph_sizes=(size,), capture=RerunCapture())
    assert bench.engine.runner.graphs.size_for(size) == size


@pytest.mark.parametrize("overlap", [False, True])
def test_replays_give_the_tokens_of_eager_steps(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle, overlap: bool
) -> None:
    """Four recorded, three run, of lengths 1, 64 and 700; then one alone; then more than any recording holds."""
    bench = make_bench(max_requests=6, graph_sizes=(4,), capture=RerunCapture(), overlap=overlap)
    replays: list[int] = []
    graphs = bench.engine.runner.graphs
    replay = graphs.replay
    graphs.replay = lambda size: (replays.append(size), replay(size))
    for lengths in ((1, 64, 700), (700, 64, 1), (130,), (5, 6, 7, 8, 9, 10)):
        requests = [bench.add(prompt_of(length), max_tokens=20) for length in lengths]
        bench.engine.run()
        for length, request in zip(lengths, requests, strict=True):
            assert request.output_ids == oracle(prompt_of(length), 20)
    assert len(replays) > 40


def test_sixteen_copies_at_once(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    bench = make_bench(max_requests=16, graph_sizes=(8, 16), capture=RerunCapture())
    requests = [bench.add(prompt_of(45), max_tokens=12) for _ in range(16)]
    bench.engine.run()
    assert all(request.output_ids == oracle(prompt_of(45), 12) for request in requests)


def test_eager_and_replayed_steps_share_one_plan(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench(max_requests=6, graph_sizes=(2,), capture=RerunCapture())
    seen: list[int] = []
    forward = bench.model.forward
    bench.model.forward = lambda batch, plan, cache: (seen.append(id(plan)), forward(batch, plan, cache))[1]
    for count in (1, 5):
        for seed in range(count):
            bench.add(prompt_of(20, seed), max_tokens=6)
        bench.engine.run()
    assert len(set(seen)) == 2, "one for decode steps, one for steps with prefill"


def test_steps_of_every_configured_size_run_before_the_engine_is_ready(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle
) -> None:
    """What a device compiles on first use, it compiles then; the padding leaves nothing behind."""
    bench = make_bench(max_requests=4, max_step_tokens=64, warm_up_tokens=(1, 3, 64))
    assert bench.model.batches[:3] == [(0, 1), (0, 3), (0, 64)], "decoded and all tokens"
    assert {(1, 1), (3, 3), (1, 2), (3, 4)} <= {*bench.model.batches[3:]}
    assert bench.generate(prompt_of(70), max_tokens=8) == oracle(prompt_of(70), 8)
    bench.check()


@pytest.mark.parametrize("sizes", [(0,), (1, 65)])
def test_a_warm_up_that_no_step_can_hold_is_refused(make_bench: Make, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="max_step_tokens=64"):
        make_bench(warm_up_tokens=sizes)
