"""Tensors of a step: the numbers in them, their addresses, their padding, and that building allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halocline.engine.batch import Batch
from halocline.engine.graphs import RerunCapture
from halocline.engine.step_plan import StepPlan
from halocline.hal.ops.batch import BatchMetadata

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]

TENSORS = (
    "token_ids_T",
    "positions_T",
    "token_requests_T",
    "query_starts_R1",
    "seqlens_R",
    "state_slots_R",
    "window_pages_RP",
    "token_pages_RP",
)


class Recorded:
    """An engine whose every step is checked against the page tables and the tokens of its requests."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.steps: list[BatchMetadata] = []
        driver, tensors = bench.engine.driver, bench.engine.runner.tensors
        self._batches: list[Batch] = []
        self._launch, self._apply = driver.launch, tensors.apply
        driver.launch, tensors.apply = self.launch, self.apply

    def launch(self, batches: list[Batch]) -> Any:
        self._batches = batches
        return self._launch(batches)

    def apply(self, plan: StepPlan) -> BatchMetadata:
        metadata = self._apply(plan)
        self.check(self._batches[0], metadata, plan.shape.graph_size or None)
        self.steps.append(metadata)
        return metadata

    def assert_all_were_right(self) -> None:
        """The engine turns what `check` raises into an error of the step's requests."""
        assert set(self.bench.engine.stats().finished) == {"length"}

    def check(self, batch: Batch, metadata: BatchMetadata, padded: int | None) -> None:
        table = self.bench.engine.groups[0].cache.table
        rows = [*batch.decode_rows.tolist(), *(chunk.row for chunk in batch.chunks)]
        spans = [(int(table.computed[row]), int(table.computed[row]) + 1) for row in batch.decode_rows]
        spans += [(chunk.start, chunk.end) for chunk in batch.chunks]
        positions = [p for start, end in spans for p in range(start, end)]
        owners = [i for i, (start, end) in enumerate(spans) for _ in range(start, end)]
        real, count = len(positions), len(rows)
        assert (metadata.num_tokens, metadata.num_requests) == ((padded, padded) if padded else (real, count))
        assert len(metadata.positions_T) == metadata.num_tokens
        assert metadata.positions_T[:real].tolist() == positions
        assert metadata.token_requests_T[:real].tolist() == owners
        assert metadata.query_starts_R1[: count + 1].tolist() == np.cumsum([0, *(e - s for s, e in spans)]).tolist()
        assert metadata.seqlens_R[:count].tolist() == [end for _, end in spans]
        assert metadata.max_seqlen >= max(end for _, end in spans)
        assert metadata.state_slots_R[:count].tolist() == table.state_slots[rows].tolist()
        for pages, host in ((metadata.window_pages_RP, table.window), (metadata.token_pages_RP, table.tokens)):
            assert pages.shape == (metadata.num_requests, host.num_columns)
            assert pages.stride() == (host.num_columns, 1), "rows stay as far apart as at capacity"
            np.testing.assert_array_equal(pages[:count].numpy(), host.pages[rows])
            assert (pages[count:] == -1).all()
        ids = [int(t) for chunk in batch.chunks for t in chunk.request.span(chunk.start, chunk.end)]
        assert metadata.token_ids_T[len(batch.decode_rows) : real].tolist() == ids
        assert (metadata.positions_T[real:] == -1).all()
        assert (metadata.token_requests_T[real:] == -1).all()
        assert (metadata.seqlens_R[count:] == 0).all()
        assert (metadata.state_slots_R[count:] == -1).all()
        assert (metadata.query_starts_R1[count:] == real).all()


@pytest.mark.parametrize("graphs", [(), (1, 3, 4)])
def test_every_number_of_every_step(make_bench: Make, prompt_of: Prompt, graphs: tuple[int, ...]) -> None:
    """Lengths far apart come and go in both orders, so anything stale in a buffer would show."""
    bench = make_bench(graph_sizes=graphs, capture=RerunCapture() if graphs else None, num_snapshots=2)
    recorded = Recorded(bench)
    for lengths in ((300, 5, 40, 1), (2, 290, 7, 33, 300), (300, 300, 2)):
        for length in lengths:
            bench.add(prompt_of(length, 1), max_tokens=4 + length % 7)
        bench.engine.run()
    recorded.assert_all_were_right()
    assert len(recorded.steps) > 30
    if graphs:
        only_decode = [step for step in recorded.steps if step.num_tokens == step.num_decode_tokens]
        assert {step.num_requests for step in only_decode} == {1, 3, 4}


def test_a_change_of_pages_larger_than_one_upload_arrives_whole(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench()
    (builder,) = bench.engine.driver.builders
    builder.mixed.max_changes = 3
    builder.decode.max_changes = 2
    recorded = Recorded(bench)
    for _ in range(2):
        bench.add(prompt_of(400), max_tokens=40)
        bench.add(prompt_of(130), max_tokens=4)
        bench.engine.run()
    recorded.assert_all_were_right()


def test_addresses_never_change(make_bench: Make, prompt_of: Prompt) -> None:
    """Data pointers over 50 decode steps and over the prefill steps between them."""
    bench = make_bench()
    recorded = Recorded(bench)
    for seed in range(3):
        bench.add(prompt_of(70 + seed, seed), max_tokens=45)
    while bench.engine.has_work:
        bench.engine.step()
        if len(recorded.steps) == 30:
            bench.add(prompt_of(90, 9), max_tokens=35)
    recorded.assert_all_were_right()
    kinds: dict[bool, set[tuple[int, ...]]] = {}
    for step in recorded.steps:
        pointers = tuple(getattr(step, name).data_ptr() for name in TENSORS)
        kinds.setdefault(step.num_tokens == step.num_decode_tokens, set()).add(pointers)
    assert len(recorded.steps) >= 50
    assert [len(kinds[decode]) for decode in (False, True)] == [1, 1]


@pytest.mark.parametrize("graphs", [(), (2, 4)])
def test_no_step_reads_what_the_last_one_left(
    make_bench: Make, prompt_of: Prompt, oracle: Callable[..., list[int]], graphs: tuple[int, ...]
) -> None:
    """Garbage fills all buffers of a step, padded rows among them, before each step is built."""
    bench = make_bench(graph_sizes=graphs, capture=RerunCapture() if graphs else None)
    tensors = bench.engine.runner.tensors
    apply = tensors.apply

    def after_garbage(plan: StepPlan) -> BatchMetadata:
        for buffers in (tensors.decode, tensors.mixed):
            for tensor in buffers.tensors.values():
                tensor.random_(0, 100)
        return apply(plan)

    tensors.apply = after_garbage
    requests = [bench.add(prompt_of(length), max_tokens=12) for length in (1, 64, 290)]
    bench.engine.run()
    for length, request in zip((1, 64, 290), requests, strict=True):
        assert request.output_ids == oracle(prompt_of(length), 12)


# ---- allocations --------------------------------------------------------------------------------------------------


class CountAllocations(TorchDispatchMode):
    """Lists every op whose result is new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is(t)}
        outputs = [t for t in torch.utils._pytree.tree_leaves(result) if _is(t)]
        if any(t.untyped_storage().data_ptr() not in inputs for t in outputs):
            self.found.append(str(func))
        return result


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@contextmanager
def _outside(counter: CountAllocations, target: Any, name: str) -> Iterator[None]:
    """Leaves out what the model and the sampler allocate while `target.name` runs."""
    inner = getattr(target, name)

    def paused(*args: Any, **kwargs: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return inner(*args, **kwargs)

    setattr(target, name, paused)
    yield
    setattr(target, name, inner)


def test_the_counter_sees_an_allocation() -> None:
    with CountAllocations() as counter:
        torch.zeros(3)[:2].add_(1)
        torch.zeros(3) + 1
    assert counter.found == ["aten.zeros.default", "aten.zeros.default", "aten.add.Tensor"]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_step_loop_allocates_no_tensor(make_bench: Make, prompt_of: Prompt, overlap: bool) -> None:
    """After warm-up: decode, mixed steps, hits, evictions, aborts. What model and sampler do is not counted."""
    bench = make_bench(overlap=overlap, max_token_pages=24, max_positions=512, num_snapshots=3)
    engine = bench.engine

    def traffic() -> None:
        for length in (150, 190, 230, 70):
            bench.add(prompt_of(length), max_tokens=20)
        for _ in range(8):
            engine.step()
        dropped = bench.add(prompt_of(64), max_tokens=20)
        engine.step()
        engine.abort(dropped)
        engine.run()

    counter = CountAllocations()
    parts = [(bench.model, "forward"), (bench.model, "compute_logits"), (engine.sampler, "sample")]
    with _outside(counter, *parts[0]), _outside(counter, *parts[1]), _outside(counter, *parts[2]), counter:
        traffic()
        traffic()
    gathered_by_the_model = {"aten.index_select.default"}  # hidden rows of the tokens that are sampled
    assert set(counter.found) <= gathered_by_the_model, counter.found
    assert engine.stats().hits > 0
