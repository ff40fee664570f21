"""The network gives the same logits however it is spread over processes: chunks of prompts, decode, idle ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_tasks import BLOCKS, FOURS, ROOT, Answer, Feed
from rank_world import RankWorld

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.parallel import ParallelSizes

BOUND = 5e-5
SIZES = {
    "tp2": ParallelSizes(tp=2),
    "tp4": ParallelSizes(tp=4),
    "ep2": ParallelSizes(ep=2),
    "ep4": ParallelSizes(ep=4),
    "dp2-ep2": ParallelSizes(dp=2, ep=2),
    "tp2-ep2": ParallelSizes(tp=2, ep=2),
    "dp2": ParallelSizes(dp=2),
    "tp2-ep4": ParallelSizes(tp=2, ep=4),
    "dp2-ep4": ParallelSizes(dp=2, ep=4),
    "tp2-dp2-ep2": ParallelSizes(tp=2, dp=2, ep=2),
    "tp2-dp2-ep4": ParallelSizes(tp=2, dp=2, ep=4),
    "dp4-ep4": ParallelSizes(dp=4, ep=4),
}


def feed(vocab_size: int) -> Feed:
    """Four requests. Requests 1 and 3 (the second of two groups) start late and stop early: their rank has nothing."""
    generator = np.random.default_rng(0)
    steps = [
        [60, 0, 3, 0],
        [0, 9, 70, 0],
        [70, 130, 0, 11],
        [0, 0, 0, 0],
        *[[1, 1, 1, 1]] * 3,
        [1, 0, 1, 0],
        [1, 0, 0, 0],
    ]
    totals = np.sum(steps, axis=0)
    return Feed(ids=[generator.integers(2, vocab_size, total + 1).tolist() for total in totals], steps=steps)


@pytest.fixture(scope="module")
def whole(ranks: RankWorld) -> Answer:
    """One process, all requests in one batch."""
    (found,) = ranks.run(1, "model_tasks:answer", sizes=ParallelSizes(), feed=feed(FOURS.vocab_size))
    assert found.calls == []
    return found


@pytest.fixture(scope="module")
def graded_whole(ranks: RankWorld) -> Answer:
    """The shipped model in one process."""
    (found,) = ranks.run(1, "model_tasks:answer", sizes=ParallelSizes(), feed=feed(1024), folder=str(ROOT / "graded"))
    return found


def compare(answers: list[Answer], expected: Answer, sizes: ParallelSizes) -> None:
    """Every rank has all logits of its group's requests, and every request is somewhere."""
    seen = set[int]()
    for rank, found in enumerate(answers):
        group = rank // (sizes.world // sizes.dp)
        assert set(found.logits) == set(range(group, 4, sizes.dp))
        for request in found.logits:
            for ours, theirs in ((found.logits, expected.logits), (found.drafts, expected.drafts)):
                assert ours[request].shape == theirs[request].shape
                assert np.abs(ours[request] - theirs[request]).max() <= BOUND
                assert (ours[request].argmax(-1) == theirs[request].argmax(-1)).all()
        seen |= set(found.logits)
    assert seen == {0, 1, 2, 3}


def check_order(answers: list[Answer]) -> None:
    """The same list of collectives on every rank, whatever it had to do."""
    assert answers[0].calls
    for found in answers[1:]:
        assert found.calls == answers[0].calls


@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_one_process(ranks: RankWorld, whole: Answer, name: str) -> None:
    sizes = SIZES[name]
    answers = ranks.run(sizes.world, "model_tasks:answer", sizes=sizes, feed=feed(FOURS.vocab_size))
    compare(answers, whole, sizes)
    check_order(answers)


@pytest.mark.parametrize("world", [2, 4])
def test_rows_may_be_sent_to_their_experts(ranks: RankWorld, whole: Answer, world: int) -> None:
    sizes = ParallelSizes(dp=world, ep=world)
    answers = ranks.run(world, "model_tasks:answer", sizes=sizes, feed=feed(FOURS.vocab_size), a2a="all_to_all")
    compare(answers, whole, sizes)
    for found in answers:  # how many rows go where differs by rank, the order of the exchanges does not
        assert [call[0] for call in found.calls] == [call[0] for call in answers[0].calls]
        assert {call[0] for call in found.calls} == {"collective.all_to_all"}


@pytest.mark.parametrize("name", ["ep2", "dp2-ep2", "tp2-ep2"])
def test_the_shipped_model_gives_the_logits_of_one_process(ranks: RankWorld, graded_whole: Any, name: str) -> None:
    sizes = SIZES[name]
    answers = ranks.run(2, "model_tasks:answer", sizes=sizes, feed=feed(1024), folder=str(ROOT / "graded"))
    compare(answers, graded_whole, sizes)
    check_order(answers)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with FP8 blocks and packed FP4 experts, whose parts of four are whole blocks."""
    folder = tmp_path_factory.mktemp("released") / "blocks"
    make_checkpoint(folder, BLOCKS, seed=3)
    return str(folder)


def test_parts_of_low_bit_matrices_give_the_logits_of_the_whole(ranks: RankWorld, released: str) -> None:
    asked = {"feed": feed(BLOCKS.vocab_size), "folder": released}
    (expected,) = ranks.run(1, "model_tasks:answer", sizes=ParallelSizes(), **asked)
    for name in ("tp4", "tp2-dp2-ep2"):
        answers = ranks.run(4, "model_tasks:answer", sizes=SIZES[name], **asked)
        compare(answers, expected, SIZES[name])
