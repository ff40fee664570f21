"""Plans as strings of bytes, what a rank makes of them, and padding up to what was decided for all groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halocline.engine.graphs import RerunCapture, StepMismatchError
from halocline.engine.logit_exchange import LogitExchange
from halocline.engine.runner import ModelRunner
from halocline.engine.step_plan import StepLayout, StepPlan, StepShape

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]
Oracle = Callable[..., list[int]]


def some_plan(**changes: Any) -> StepPlan:
    facts: dict[str, Any] = {
        "shape": StepShape(mixed=True, num_tokens=70, sampled=3, graph_size=0, scored=(9, 4)),
        "packed": torch.arange(64, dtype=torch.uint8),
        "num_requests": 5,
        "num_decode": 2,
        "num_sampled": 3,
        "max_seqlen": 70_000,
        "window_changes": 7,
        "token_changes": 0,
        "scored": ((11, 9), (0, 0)),
        "copies": ((1, 2), (3, 4)),
        "restores": ((5, 6),),
    }
    return StepPlan(**{**facts, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"copies": (), "restores": (), "scored": (), "shape": StepShape(mixed=False, num_tokens=4, sampled=3)},
        {"packed": torch.zeros(0, dtype=torch.uint8), "copies": ()},
    ],
)  # fmt: skip
def test_a_plan_survives_its_journey(changes: dict[str, Any]) -> None:
    plan = some_plan(**changes)
    data = plan.to_bytes()
    found, used = StepPlan.from_bytes(data + b"what follows")
    assert used == len(data)
    assert found._replace(packed=plan.packed) == plan
    assert torch.equal(found.packed, plan.packed)


def test_changes_of_page_tables_lie_last_and_can_be_left_out() -> None:
    layout = StepLayout(10, 3, 4)
    packed = torch.arange(layout.nbytes, dtype=torch.int32).to(torch.uint8)
    whole = layout.views(packed)
    for name in ("window_cells", "window_values", "token_cells", "token_values"):
        assert whole[name].storage_offset() * whole[name].element_size() >= layout.nbytes_without_changes
    assert whole["token_requests"].storage_offset() * 4 < layout.nbytes_without_changes
    assert {len(whole[n]) for n in ("token_ids", "positions", "token_requests")} == {10}
    spans = sorted((v.storage_offset() * v.element_size(), v.numel() * v.element_size()) for v in whole.values())
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))


SMALL: dict[str, Any] = {"max_token_pages": 12, "max_positions": 256}


class Alone(LogitExchange):
    """The exchange of a rank whose tokens come from a list."""

    def __init__(self, sampled: list[torch.Tensor]) -> None:
        self._sampled = sampled

    def gather(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (logits_RV,)

    def receive_ids(self, num_rows: int) -> torch.Tensor:
        return self._sampled.pop(0)


def follower_of(bench: Any, sampled: list[torch.Tensor]) -> ModelRunner:
    """A second runner with caches of its own, ready to carry out the plans of an engine."""
    engine = bench.engine
    runner = ModelRunner(
        type(bench.model)(),
        engine.memory,
        engine.config,
        device=torch.device("cpu"),
        capture=RerunCapture() if engine.config.graph_sizes else None,
        exchange=Alone(sampled),
    )
    runner.warm_up()
    return runner


@pytest.mark.parametrize("graphs", [(), (1, 3, 4)])
def test_a_rank_that_gets_bytes_ends_up_with_the_same_rows(
    make_bench: Make, prompt_of: Prompt, graphs: tuple[int, ...]
) -> None:
    """Chunks, hits, preemption, snapshots: every cached row and every page table equals those of the engine's rank."""
    bench = make_bench(graph_sizes=graphs, capture=RerunCapture() if graphs else None, **SMALL)
    engine = bench.engine
    sampled: list[torch.Tensor] = []
    follower = follower_of(bench, sampled)
    (builder,) = engine.driver.builders
    builder.mixed.max_changes = builder.decode.max_changes = 3
    plans, keep = builder.plans, engine.runner.keep_ids
    messages: list[bytes] = []

    def sending(*args: Any) -> Any:
        for plan in plans(*args):
            messages.append(plan.to_bytes())
            yield plan

    def keeping(plan: StepPlan, ids: Any) -> None:
        sampled.append(ids[0].clone())
        keep(plan, ids)

    builder.plans, engine.runner.keep_ids = sending, keeping
    for lengths, count in (((150, 5, 40, 1), 9), ((100, 101, 102), 60), ((33, 102), 9)):
        requests = [bench.add(prompt_of(length, 1), max_tokens=count) for length in lengths]
        engine.run()
        assert {request.finish_reason for request in requests} == {"length"}
    for message in messages:
        follower.follow(StepPlan.from_bytes(message)[0])
    assert sampled == []
    assert engine.stats().hits > 0
    assert engine.stats().preemptions > 0
    own, other = engine.runner.cache.tags, follower.cache.tags
    assert torch.equal(torch.from_numpy(own._window.fingerprint), torch.from_numpy(other._window.fingerprint))
    for mine, its in zip(engine.runner.tensors._tables, follower.tensors._tables, strict=True):
        assert torch.equal(mine._all, its._all)
    assert torch.equal(engine.runner.tensors.last_ids, follower.tensors.last_ids)


def test_another_graph_than_the_one_decided_is_noticed_before_it_runs(make_bench: Make, prompt_of: Prompt) -> None:
    """One rank was forced to another bucket: it says so and enters nothing."""
    bench = make_bench(graph_sizes=(2, 4), capture=RerunCapture())
    follower = follower_of(bench, [])
    follower.graphs = type(follower.graphs)((4,))
    follower.graphs.record(RerunCapture(), lambda size: lambda: None)
    calls = len(follower.model.batches)  # type: ignore[attr-defined]
    shape = StepShape(mixed=False, num_tokens=2, sampled=1, graph_size=2)
    plan = some_plan(shape=shape, scored=(), copies=(), restores=())
    with pytest.raises(StepMismatchError, match="the graph of 2") as caught:
        follower.follow(plan)
    assert "the graph of 4" in str(caught.value)
    assert len(follower.model.batches) == calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("mixed", [False, True])
def test_padding_up_to_the_longest_group(make_bench: Make, prompt_of: Prompt, mixed: bool) -> None:
    """A group that brings less than another has padding behind its own tokens; one that brings nothing only that."""
    bench = make_bench()
    engine = bench.engine
    (builder,) = engine.driver.builders
    bench.add(prompt_of(10), max_tokens=5)
    engine.step()
    batch = engine.groups[0].next_batch(0.0)
    nothing = type(batch)(decode_requests=[], decode_rows=batch.decode_rows[:0])
    for one, real in ((batch, 1), (nothing, 0)):
        shape = StepShape(mixed=mixed, num_tokens=4, sampled=3)
        (plan,) = builder.plans(one, shape)
        metadata = engine.runner.tensors.apply(StepPlan.from_bytes(plan.to_bytes())[0])
        assert metadata.num_tokens == 4
        assert metadata.positions_T.tolist() == [10] * real + [-1] * (4 - real)
        assert metadata.token_requests_T.tolist() == [0] * real + [-1] * (4 - real)
        assert metadata.num_requests == (4 if not mixed else 1)
        assert metadata.num_decode_tokens == (4 if not mixed else real)
        assert (metadata.seqlens_R[real:] == 0).all()
        assert (metadata.window_pages_RP[real:] == -1).all()
        assert plan.num_sampled == real
        assert (engine.runner.tensors.sampled_tokens(plan) < 4).all()
