"""A run that is told what to choose and read does that, and still says what it would have done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.kernels import reference_kernels
from halocline.benchmarks.forced_run import ForcedModel, Kept, Part, equal_choices
from halocline.hal.ops import Ops
from halocline.hal.ops.attention import RowSelection

SCALE = 1.5


class Site:
    """Reads the sum of two streams and adds what it is given to the first of them."""

    def read(self, streams_TND: Tensor) -> Tensor:
        return streams_TND.sum(1)

    def write(self, y_TD: Tensor, streams_TND: Tensor, _mixed: Tensor) -> Tensor:
        return torch.stack((streams_TND[:, 0] + y_TD, streams_TND[:, 1]), dim=1)


def forced(select: Any = None) -> tuple[ForcedModel, Any]:
    """A model of one layer that has no more than a router, an indexer and two sites, and the layer."""
    kernels: dict[str, Any] = dict(reference_kernels())
    if select is not None:
        kernels["indexer.select"] = select
    block = SimpleNamespace(ops=Ops(kernels), attention_site=Site(), ffn_site=Site())
    model: Any = SimpleNamespace(blocks=[block])
    return ForcedModel(model), block


def scores(seed: int) -> Tensor:
    return torch.randn(20, 12, generator=torch.Generator().manual_seed(seed))


def test_experts_of_another_run_are_weighed_by_own_scores() -> None:
    model, block = forced()
    bias_E = torch.linspace(-1, 1, 12)  # it decides what is chosen, and never weighs
    first = block.ops.moe.route_by_score(scores(1), bias_E, num_chosen=3, scale=SCALE)
    before = model.kept
    model.start(choices=before)
    second = block.ops.moe.route_by_score(scores(2), bias_E, num_chosen=3, scale=SCALE)
    torch.testing.assert_close(second.ids_TK.sort(-1).values, first.ids_TK.sort(-1).values)
    own_TK = torch.log1p(scores(2).exp()).sqrt().gather(1, second.ids_TK.long())
    torch.testing.assert_close(second.weights_TK, SCALE * own_TK / own_TK.sum(-1, keepdim=True))
    free, other = forced()
    own = other.ops.moe.route_by_score(scores(2), bias_E, num_chosen=3, scale=SCALE)
    torch.testing.assert_close(model.kept.choices["experts", 0][0], own.ids_TK)
    same = equal_choices(model.kept, before, "experts")
    assert same == equal_choices(free.kept, before, "experts")
    assert same is not None
    assert 0 <= same < 1


def test_a_router_that_chooses_the_same_is_left_alone() -> None:
    model, block = forced()
    own = block.ops.moe.route_by_score(scores(1), torch.zeros(12), num_chosen=3, scale=SCALE)
    turned = Kept(choices={("experts", 0): [own.ids_TK.flip(-1)]})
    model.start(choices=turned)
    again = block.ops.moe.route_by_score(scores(1), torch.zeros(12), num_chosen=3, scale=SCALE)
    assert torch.equal(again.ids_TK, own.ids_TK)
    assert torch.equal(again.weights_TK, own.weights_TK)
    assert equal_choices(model.kept, turned, "experts") == 1.0


def test_entries_of_another_run_are_seen_call_by_call() -> None:
    """What stands behind the length of a selection is no choice."""
    own = iter([[[3, 1, 99], [7, 98, 97]], [[4, 5, 6], [2, 96, 95]], [[5, 3, 94], [7, 93, 92]], [[6, 5, 4], [1, 0, 0]]])

    def select(*_arguments: object, **_options: object) -> RowSelection:
        slots_TK = torch.tensor(next(own), dtype=torch.int32)
        return RowSelection(slots_TK, torch.tensor([2 if slots_TK[0, 2] > 90 else 3, 1], dtype=torch.int32))

    model, block = forced(select)
    options = {"first_token": 0, "num_kept": 3, "page_rows": 64}
    for _ in range(2):
        block.ops.indexer.select(None, None, **options)
    before = model.kept
    model.start(choices=before)
    seen = [block.ops.indexer.select(None, None, **options) for _ in range(2)]
    assert [one.slots_TK.tolist() for one in seen] == [[[3, 1, -1], [7, -1, -1]], [[4, 5, 6], [2, -1, -1]]]
    assert [one.lengths_T.tolist() for one in seen] == [[2, 1], [3, 1]]
    # Of four rows, 5 and 3 are not 3 and 1, 7 is 7, 6, 5 and 4 are the same set, and 1 is not 2.
    assert equal_choices(model.kept, before, "entries") == 0.5


def test_each_part_reads_the_streams_of_another_run() -> None:
    def run(model: ForcedModel, block: Any, start_TND: Tensor) -> Tensor:
        streams_TND = start_TND
        for site, factor in ((block.attention_site, 2.0), (block.ffn_site, 3.0)):
            x_TD = site.read(streams_TND)
            streams_TND = site.write(factor * x_TD, streams_TND, x_TD)
        return streams_TND

    model, block = forced()
    expected = run(model, block, torch.ones(4, 2, 8))
    before = model.kept
    model.start(streams=before)
    found = run(model, block, torch.full((4, 2, 8), 100.0))
    assert torch.equal(found, expected)
    for part in (Part(0, "attention"), Part(0, "experts")):
        assert torch.equal(model.kept.outputs[part][0], before.outputs[part][0])
        assert torch.equal(model.kept.written[part][0], before.written[part][0])
    model.start()
    assert not torch.equal(run(model, block, torch.full((4, 2, 8), 100.0)), expected)


@pytest.mark.parametrize("what", ["experts", "entries"])
def test_nothing_chosen_has_no_share(what: Any) -> None:
    assert equal_choices(Kept(), Kept(), what) is None
