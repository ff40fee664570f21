"""Requests from arrival to their end: what ends them, what must not, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from halocline.backends_reference.kernels import reference_kernels
from halocline.engine.request import Request, RequestUpdate
from halocline.engine.sampler import Sampler
from halocline.hal.errors import MachineError, RequestError
from halocline.hal.ops import Ops

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]
Oracle = Callable[[Sequence[int], int], list[int]]


def real_sampler(rows: int = 4) -> Sampler:
    return Sampler(rows, 97, Ops(reference_kernels()), "cpu")


class Log:
    """Keeps what a request is told."""

    def __init__(self) -> None:
        self.updates: list[RequestUpdate] = []

    def __call__(self, request: Request, update: RequestUpdate) -> None:
        self.updates.append(update)

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def reasons(self) -> list[str]:
        return [update.finish_reason for update in self.updates if update.finish_reason is not None]


# ---- the normal course --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 31, 32, 33, 63, 64, 65, 300])
def test_tokens_are_those_of_the_model(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle, length: int, overlap: bool
) -> None:
    bench = make_bench(overlap=overlap)
    assert bench.generate(prompt_of(length), max_tokens=40) == oracle(prompt_of(length), 40)
    assert bench.generate(prompt_of(length), max_tokens=40) == oracle(prompt_of(length), 40)
    bench.check()


def test_each_token_is_told_once_and_the_end_with_the_last(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    bench = make_bench()
    logs = [Log(), Log()]
    for seed, log in enumerate(logs):
        bench.add(prompt_of(40, seed), max_tokens=7 + seed, on_update=log)
    bench.engine.run()
    for seed, log in enumerate(logs):
        assert log.tokens == oracle(prompt_of(40, seed), 7 + seed)
        assert log.updates[-1].finish_reason == "length"
        assert log.reasons == ["length"]


def test_times_are_in_the_order_of_events(make_bench: Make, prompt_of: Prompt) -> None:
    time = [10.0]

    def clock() -> float:
        time[0] += 1.0
        return time[0]

    bench = make_bench(clock=clock)
    request = bench.add(prompt_of(100), max_tokens=3)
    bench.engine.run()
    times = [request.arrival_time, request.start_time, request.first_token_time, request.finish_time]
    assert times == sorted(set(times))
    assert times[0] > 10.0


def test_a_prompt_may_only_be_read(make_bench: Make, prompt_of: Prompt) -> None:
    """max_tokens 0: one prefill, no token, and the prefix is there for the next one."""
    bench = make_bench()
    log = Log()
    request = bench.add(prompt_of(100), max_tokens=0, on_update=log)
    bench.engine.run()
    assert (request.output_ids, log.tokens, log.reasons) == ([], [], ["length"])
    again = bench.add(prompt_of(100), max_tokens=1)
    bench.engine.run()
    assert again.num_cached_tokens == 96


def test_without_a_limit_the_output_fills_the_context(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    bench = make_bench(max_positions=64)
    request = bench.add(prompt_of(50))
    bench.engine.run()
    assert request.output_ids == oracle(prompt_of(50), 14)
    full = bench.add(prompt_of(63), max_tokens=1)
    bench.engine.run()
    assert full.output_ids == oracle(prompt_of(63), 1)


def test_two_hundred_prompts_together_are_as_one_by_one(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    bench = make_bench(max_requests=12, max_token_pages=40, max_positions=512, max_step_tokens=128)
    lengths = [1 + (37 * i) % 211 for i in range(200)]
    requests = [bench.add(prompt_of(length, i % 9), max_tokens=1 + i % 23) for i, length in enumerate(lengths)]
    bench.engine.run()
    for i, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        assert request.output_ids == oracle(prompt_of(length, i % 9), 1 + i % 23)
    bench.check()


# ---- stops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_token_ends_the_output_and_belongs_to_it(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle, overlap: bool
) -> None:
    expected = oracle(prompt_of(40), 12)
    stop = next(token for i, token in enumerate(expected) if i >= 5 and token not in expected[:i])
    bench = make_bench(overlap=overlap)
    request = bench.add(prompt_of(40), max_tokens=50, stop_token_ids=[stop])
    other = bench.add(prompt_of(41), max_tokens=30)
    bench.engine.run()
    assert request.output_ids == expected[: expected.index(stop) + 1]
    assert request.finish_reason == "stop"
    assert other.output_ids == oracle(prompt_of(41), 30), "another's stop token is an ordinary one here"


def test_the_models_end_token_stops_unless_it_is_ignored(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    expected = oracle(prompt_of(40), 20)
    eos = expected[6]
    first = expected.index(eos)
    bench = make_bench(eos_ids=(eos,))
    stopped, ignoring = (
        bench.add(prompt_of(40), max_tokens=20),
        bench.add(prompt_of(40), max_tokens=20, ignore_eos=True),
    )
    patient = bench.add(prompt_of(40), max_tokens=20, min_tokens=first + 1)
    bench.engine.run()
    assert (stopped.output_ids, stopped.finish_reason) == (expected[: first + 1], "stop")
    assert (ignoring.output_ids, ignoring.finish_reason) == (expected, "length")
    assert patient.output_ids[: first + 1] == expected[: first + 1]
    assert len(patient.output_ids) > first + 1


def test_a_stop_on_the_last_allowed_token_is_a_stop(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    expected = oracle(prompt_of(40), 6)
    assert expected[5] not in expected[:5]
    bench = make_bench()
    request = bench.add(prompt_of(40), max_tokens=6, stop_token_ids=[expected[5]])
    bench.engine.run()
    assert request.finish_reason == "stop"


class OnlyEven:
    """A token mask: even tokens, and the output is complete after five of them."""

    def start(self) -> OnlyEven.Matcher:
        return OnlyEven.Matcher()

    class Matcher:
        def __init__(self) -> None:
            self.taken: list[int] = []

        def fill(self, bitmask_W: np.ndarray) -> None:
            bitmask_W[:] = 0x55555555

        def accept(self, token_id: int) -> bool:
            self.taken.append(token_id)
            return len(self.taken) < 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_mask_sees_every_token_before_the_next_is_drawn(
    make_bench: Make, prompt_of: Prompt, overlap: bool
) -> None:
    bench = make_bench(sampler=real_sampler(), overlap=overlap)
    masked = bench.add(prompt_of(40), temperature=1.0, seed=1, max_tokens=20, token_mask=OnlyEven())
    free = bench.add(prompt_of(41), temperature=1.0, seed=1, max_tokens=20)
    bench.engine.run()
    assert masked.finish_reason == "stop"
    assert masked.matcher.taken == masked.output_ids
    assert len(masked.output_ids) == 5
    assert all(token % 2 == 0 for token in masked.output_ids)
    assert any(token % 2 for token in free.output_ids)


# ---- the sampler's part -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_seed_depends_on_the_request_alone(make_bench: Make, prompt_of: Prompt, overlap: bool) -> None:
    """Alone, beside unseeded ones, in another row, after a preemption."""

    def seeded(bench: Any) -> Request:
        return bench.add(prompt_of(45), temperature=1.0, seed=77, max_tokens=30)

    bench = make_bench(sampler=real_sampler(), overlap=overlap)
    alone = seeded(bench)
    bench.engine.run()
    for seed in range(3):
        bench.add(prompt_of(20 + seed), temperature=1.0, max_tokens=25)
    beside = seeded(bench)
    for _ in range(12):
        bench.engine.step()
    assert beside.row not in (0, -1), "alone, it had row 0"
    bench.engine.groups[0].scheduler._preempt(beside)
    bench.engine.run()
    assert beside.num_preemptions == 1
    assert alone.output_ids == beside.output_ids
    assert len(set(alone.output_ids)) > 5


def test_logprobs_come_with_their_tokens(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench(sampler=real_sampler())
    log = Log()
    request = bench.add(prompt_of(40), max_tokens=6, logprobs=2, on_update=log)
    plain = bench.add(prompt_of(41), max_tokens=6)
    bench.engine.run()
    assert [entry.token_id for entry in request.output_logprobs] == request.output_ids
    assert [entry for update in log.updates for entry in update.logprobs] == request.output_logprobs
    top = np.log(np.exp(1.0) / (np.exp(1.0) + 96))
    assert all(entry.logprob == pytest.approx(top, abs=1e-5) for entry in request.output_logprobs)
    assert plain.output_logprobs == []


@pytest.mark.parametrize("chunk", [7, 32, 64])
def test_prompt_logprobs_are_complete_in_any_chunking_and_on_a_hit(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle, chunk: int
) -> None:
    """A prompt that wants its own log-probabilities is computed whole even where it is cached."""
    bench = make_bench(sampler=real_sampler(), max_chunk_tokens=chunk)
    prompt = prompt_of(100)
    bench.generate(prompt, max_tokens=2)
    requests = [bench.add(prompt, max_tokens=2, prompt_logprobs=1) for _ in range(2)]
    bench.engine.run()
    for request in requests:
        assert request.num_cached_tokens == 0
        assert [entry.token_id for entry in request.prompt_logprobs] == prompt[1:]
        assert [entry.top[0][0] for entry in request.prompt_logprobs] == [
            oracle(prompt[:end], 1)[0] for end in range(1, 100)
        ]


def test_prompt_logprobs_survive_a_preemption_in_the_middle(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench(sampler=real_sampler(), max_chunk_tokens=16)
    request = bench.add(prompt_of(100), max_tokens=2, prompt_logprobs=0)
    for _ in range(4):
        bench.engine.step()
    assert 0 < len(request.prompt_logprobs) < 99
    bench.engine.groups[0].scheduler._preempt(request)
    bench.engine.run()
    assert [entry.token_id for entry in request.prompt_logprobs] == prompt_of(100)[1:]


# ---- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([5, 97], {}, "97 at index 1\n  found  a vocabulary of ids 0 to 96"),
        ([5, -1], {}, "-1 at index 1"),
        ([1] * 65, {}, "65 tokens\n  found  a context of 64 tokens"),
        ([1] * 64, {}, "leaves no room for output"),
        ([1] * 60, {"max_tokens": 5}, "more than the context of 64 tokens holds after a prompt of 60"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_costs_anything(
    make_bench: Make, prompt: list[int], params: dict[str, Any], message: str
) -> None:
    bench = make_bench(max_positions=64)
    with pytest.raises(RequestError, match=message):
        bench.add(prompt, **params)
    assert not bench.engine.has_work
    assert bench.all_free()


def test_a_step_without_requests_does_nothing(make_bench: Make) -> None:
    bench = make_bench()
    bench.engine.step()
    bench.engine.run()
    assert bench.engine.stats().steps == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_fails_one_request_and_leaves_the_others(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle, overlap: bool
) -> None:
    """Its token is fed to the next step before it is read; its prefix may not serve anybody."""
    expected = oracle(prompt_of(70), 40)
    poison = expected[20]
    bench = make_bench(nan_tokens=frozenset({poison}), overlap=overlap)
    clean = [seed for seed in range(50) if poison not in [*prompt_of(40, seed), *oracle(prompt_of(40, seed), 39)]]
    log = Log()
    request = bench.add([token for token in prompt_of(70) if token != poison], max_tokens=200, on_update=log)
    others = {seed: bench.add(prompt_of(40, seed), max_tokens=40) for seed in clean[:2]}
    bench.engine.run()
    assert (request.finish_reason, log.reasons) == ("error", ["error"])
    assert "NaN" in (request.error or "")
    for seed, other in others.items():
        assert other.output_ids == oracle(prompt_of(40, seed), 40)
    again = bench.add(request.admitted.prompt_ids, max_tokens=1)
    bench.engine.run()
    assert again.num_cached_tokens == 0, "nobody resumes on bad rows"
    bench.check()


def test_a_callback_that_raises_loses_its_request_only(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    calls: list[RequestUpdate] = []

    def raising(request: Request, update: RequestUpdate) -> None:
        calls.append(update)
        if len(calls) == 3:
            raise ValueError("the client is gone")

    bench = make_bench()
    request = bench.add(prompt_of(40), max_tokens=30, on_update=raising)
    other = bench.add(prompt_of(41), max_tokens=30)
    bench.engine.run()
    assert (request.finish_reason, len(calls)) == ("error", 3)
    assert request.error == "its callback raised ValueError: the client is gone"
    assert other.output_ids == oracle(prompt_of(41), 30)
    bench.check()


def test_a_callback_may_end_its_request_or_another(make_bench: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    """As a stop text or a cancelled future does, from within the step."""
    bench = make_bench()
    log = Log()
    other = bench.add(prompt_of(41), max_tokens=30, on_update=log)

    def ending(request: Request, update: RequestUpdate) -> None:
        if len(request.output_ids) >= 5 and not request.is_finished:
            bench.engine.abort(request)
            bench.engine.abort(other)

    request = bench.add(prompt_of(40), max_tokens=30, on_update=ending)
    bench.engine.run()
    assert request.output_ids[:5] == oracle(prompt_of(40), 5)
    assert (request.finish_reason, other.finish_reason) == ("abort", "abort")
    assert log.reasons == ["abort"]
    bench.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_raises_fails_its_requests_and_the_engine_lives(
    make_bench: Make, prompt_of: Prompt, oracle: Oracle, overlap: bool
) -> None:
    bench = make_bench(overlap=overlap, max_requests=2)
    running = [bench.add(prompt_of(40, seed), max_tokens=30) for seed in range(2)]
    waiting = bench.add(prompt_of(50), max_tokens=30)
    for _ in range(6):
        bench.engine.step()
    bench.model.broken = True
    bench.engine.step()
    bench.model.broken = False
    bench.engine.run()
    assert [request.finish_reason for request in running] == ["error", "error"]
    assert running[0].error == "the step failed: RuntimeError: the device fell over"
    assert waiting.output_ids == oracle(prompt_of(50), 30)
    bench.check()


def test_one_prompt_of_many_chunks_is_not_a_leak(make_bench: Make, prompt_of: Prompt) -> None:
    """The idle check counts what requests in flight hold."""
    bench = make_bench(prefix_caching=False)
    request = bench.add(prompt_of(300), max_tokens=3)
    while bench.engine.has_work:
        bench.check()
        bench.engine.step()
    assert request.finish_reason == "length"
    assert bench.all_free()


def test_the_idle_check_finds_a_leak(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench()
    bench.generate(prompt_of(40), max_tokens=3)
    bench.check()
    bench.engine.groups[0].cache.token_pool.allocate(1)
    with pytest.raises(MachineError, match="a token page is held although nothing runs"):
        bench.check()
