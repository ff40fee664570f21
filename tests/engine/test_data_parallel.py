"""Two attention groups behind one engine: the second runs on a thread that follows the first one's plans."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from halocline.engine.admission import admit
from halocline.engine.config import EngineConfig
from halocline.engine.engine import Engine
from halocline.engine.graphs import RerunCapture
from halocline.engine.memory_plan import MemoryPlan
from halocline.engine.request import Request
from halocline.engine.runner import ModelRunner
from halocline.engine.sampling_params import SamplingParams
from halocline.engine.step_plan import StepPlan

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]
Oracle = Callable[[Sequence[int], int], list[int]]


class Line:
    """Between the two ranks: plans and tokens one way, logits the other."""

    def __init__(self) -> None:
        self.plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.logits: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.ids: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()


class First:
    """The first rank's exchange, and its way to send plans."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.sizes: list[tuple[int, ...]] = []
        self._counts: list[int] = []

    def gather(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        other = self._line.logits.get(timeout=20)
        assert other.shape == logits_RV.shape, "both groups bring equally many rows"
        return logits_RV, other

    def send_ids(self, ids: Sequence[torch.Tensor], num_rows: int) -> None:
        padded = torch.zeros(num_rows, dtype=torch.int32)
        padded[: len(ids[1])] = ids[1]
        self._line.ids.put(padded)

    def add(self, group: int, plan: StepPlan) -> None:
        if plan.shape.num_tokens:
            self._counts.append(plan.shape.num_tokens)
        if group == 1:
            self._line.plans.put(plan.to_bytes())

    def send(self) -> None:
        counts, self._counts = self._counts, []
        self.sizes.append(tuple(counts))


class Second:
    """The second rank's exchange."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def gather(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._line.logits.put(logits_RV.clone())
        return (logits_RV,)

    def receive_ids(self, num_rows: int) -> torch.Tensor:
        ids = self._line.ids.get(timeout=20)
        assert len(ids) == num_rows
        return ids


class TwoGroups:
    """What `Lead` is to an engine."""

    num_groups = 2

    def __init__(self, model: Any, *, graphs: bool) -> None:
        self.line = Line()
        self.exchange = self.sender = First(self.line)
        self.failures: list[BaseException] = []
        self._model = model
        self._graphs = graphs
        self._thread: threading.Thread | None = None

    def start(self, config: EngineConfig, memory: MemoryPlan) -> None:
        second: Any = Second(self.line)
        capture = RerunCapture() if self._graphs else None
        runner = ModelRunner(self._model, memory, config, device=torch.device("cpu"), capture=capture, exchange=second)
        runner.warm_up()
        self._thread = threading.Thread(target=self._follow, args=(runner,), daemon=True)
        self._thread.start()

    def _follow(self, runner: ModelRunner) -> None:
        while (message := self.line.plans.get()) is not None:
            try:
                runner.follow(StepPlan.from_bytes(message)[0])
            except Exception as error:
                self.failures.append(error)
                return

    def explain(self, error: Exception) -> Exception:
        return AssertionError(f"{error!r}; the second rank: {self.failures}")

    def close(self) -> None:
        self.line.plans.put(None)
        if self._thread is not None:
            self._thread.join()


@pytest.fixture
def make_pair(make_bench: Make) -> Iterator[Callable[..., tuple[Engine, TwoGroups]]]:
    """Makes an engine of two groups, over models that compute nothing but tags."""
    made: list[TwoGroups] = []

    def make(*, graph_sizes: tuple[int, ...] = (), **options: Any) -> tuple[Engine, TwoGroups]:
        bench = make_bench()
        lead: Any = TwoGroups(type(bench.model)(), graphs=bool(graph_sizes))
        made.append(lead)
        sizes = {"max_requests": 2, "max_step_tokens": 48, "window_page_rows": 8, "page_tokens": 32}
        config = EngineConfig(cache_bytes=2**40, graph_sizes=graph_sizes, **{"max_token_pages": 40, **sizes, **options})
        capture = RerunCapture() if graph_sizes else None
        engine = Engine(type(bench.model)(), type(bench.engine.sampler)(), config, capture=capture, lead=lead)
        return engine, lead

    yield make
    for lead in made:
        lead.close()


def add(engine: Engine, prompt: Sequence[int], **params: Any) -> Request:
    admitted = admit(prompt, SamplingParams(**{"temperature": 0.0, **params}), engine.limits)
    request = Request("r", admitted)
    engine.add(request)
    return request


@pytest.mark.parametrize("graphs", [(), (1, 2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_both_groups_give_the_tokens_of_the_model(
    make_pair: Make, prompt_of: Prompt, oracle: Oracle, graphs: tuple[int, ...], overlap: bool
) -> None:
    """Lengths far apart, more requests than rows, an abort; each step is as long for one group as for the other."""
    engine, lead = make_pair(graph_sizes=graphs, overlap=overlap)
    for lengths in ((1, 64, 290, 33, 5), (200,), (2, 2, 140, 260)):
        requests = [add(engine, prompt_of(length, 1), max_tokens=4 + length % 13) for length in lengths]
        dropped = add(engine, prompt_of(120, 3), max_tokens=50)
        for _ in range(6):
            engine.step()
        engine.abort(dropped)
        engine.run()
        for length, request in zip(lengths, requests, strict=True):
            assert request.output_ids == oracle(prompt_of(length, 1), 4 + length % 13)
    engine.check_idle()
    assert len(lead.sender.sizes) > 40
    assert all(len(set(sizes)) == 1 and len(sizes) == 2 for sizes in lead.sender.sizes)
    assert engine.stats().finished == {"length": 10, "abort": 3}


def test_requests_go_where_least_is_to_do(make_pair: Make, prompt_of: Prompt) -> None:
    engine, _ = make_pair()
    requests = [add(engine, prompt_of(40, seed), max_tokens=5) for seed in range(4)]
    assert [request.group for request in requests] == [0, 1, 0, 1]
    engine.run()
    long = add(engine, prompt_of(900), max_tokens=1)
    short = [add(engine, prompt_of(20, seed), max_tokens=1) for seed in range(2)]
    assert [request.group for request in (long, *short)] == [0, 1, 1], "900 tokens weigh more than one request"
    engine.run()


def test_a_prompt_goes_to_the_group_that_knows_it(make_pair: Make, prompt_of: Prompt) -> None:
    engine, _ = make_pair()
    first = [add(engine, prompt_of(100, seed), max_tokens=1) for seed in range(2)]
    assert [request.group for request in first] == [0, 1]
    engine.run()
    again = [add(engine, prompt_of(100, seed), max_tokens=1) for seed in (1, 0)]
    assert [request.group for request in again] == [1, 0]
    engine.run()
    assert [request.num_cached_tokens for request in again] == [96, 96]


def test_other_outputs_of_a_prompt_stay_with_the_first(make_pair: Make, prompt_of: Prompt) -> None:
    engine, _ = make_pair()
    first = add(engine, prompt_of(100), max_tokens=2)
    admitted = admit(prompt_of(100), SamplingParams(temperature=0.0, max_tokens=2), engine.limits)
    others = [Request("r", admitted, index=index) for index in (1, 2)]
    for request in others:
        engine.add(request, leader=first)
    engine.run()
    assert {request.group for request in (first, *others)} == {0}
    assert [request.num_cached_tokens for request in others] == [96, 96]


def test_preemption_in_one_group_leaves_the_other_alone(make_pair: Make, prompt_of: Prompt, oracle: Oracle) -> None:
    engine, _ = make_pair(max_token_pages=8, max_positions=192)
    requests = [add(engine, prompt_of(100 + seed, seed), max_tokens=70) for seed in range(4)]
    engine.run()
    assert engine.stats().preemptions > 0
    for seed, request in enumerate(requests):
        assert request.output_ids == oracle(prompt_of(100 + seed, seed), 70)
    engine.check_idle()


def test_counts_are_those_of_both(make_pair: Make, prompt_of: Prompt) -> None:
    engine, _ = make_pair()
    for seed in range(4):
        add(engine, prompt_of(40, seed), max_tokens=3)
    assert engine.stats().unfinished == 4
    engine.run()
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.finished, stats.unfinished) == (160, {"length": 4}, 0)
    assert stats.cache_bytes == 2 * engine.memory.total_bytes
    assert sum(stats.cache.token_pages) == 2 * engine.memory.num_token_pages
