"""The sampler's rows: edits against formulas written out, and that no row depends on another."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from halocline.backends_reference.sampling import sample_reference
from halocline.engine.logprob_values import JSON_FLOOR, json_logprob
from halocline.engine.sampler import Sampler
from halocline.engine.sampling_params import SamplingParams

V = 50


def make_sampler(capacity=8, seen=None):
    def sample(logits, batch):
        if seen is not None:
            seen.append((logits.clone(), batch))
        return sample_reference(logits, batch)

    return Sampler(capacity, V, SimpleNamespace(sampling=SimpleNamespace(sample=sample)), "cpu")


def logits_of(rows, seed=0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def greedy(**more):
    return SamplingParams(temperature=0, seed=1, **more)


def test_greedy_rows_give_the_largest_logit():
    sampler = make_sampler()
    sampler.set_row(3, greedy(), [1], [])
    sampler.set_row(0, greedy(), [1], [])
    logits = logits_of(2)
    assert torch.equal(sampler.sample(logits.clone(), [3, 0]).ids_R, logits.argmax(-1).int())


def test_warming_up_draws_for_every_kind_of_count_and_changes_no_row():
    seen = []
    sampler = make_sampler(capacity=12, seen=seen)
    sampler.set_row(3, SamplingParams(temperature=1, seed=5), [1], [])
    logits = logits_of(1)
    expected = make_sampler(capacity=12)
    expected.set_row(3, SamplingParams(temperature=1, seed=5), [1], [])
    sampler.warm_up()
    assert sorted(len(rows) for rows, _ in seen) == [1, 2, 4, 8, 12]
    for _ in range(3):
        assert torch.equal(sampler.sample(logits.clone(), [3]).ids_R, expected.sample(logits.clone(), [3]).ids_R)


def run(sampler, row, params, logits_by_step, others=()):
    """Tokens of one row over steps, with other rows beside it."""
    sampler.set_row(row, params, [2, 3], [])
    for other, other_params in others:
        sampler.set_row(other, other_params, [4], [])
    rows = [*(other for other, _ in others), row]
    tokens = []
    for step, logits in enumerate(logits_by_step):
        beside = logits_of(len(others), seed=100 + step)
        ids = sampler.sample(torch.cat([beside, logits[None]]), rows).ids_R
        tokens.append(int(ids[-1]))
    return tokens


def test_a_seed_depends_on_nothing_but_the_request():
    # vllm-project/vllm#51226: alone, beside unseeded ones, in another slot
    params = SamplingParams(seed=11, top_p=0.9, presence_penalty=0.5)
    steps = [logits_of(1, seed=step)[0] for step in range(12)]
    alone = run(make_sampler(), 0, params, steps)
    others = [(row, SamplingParams(seed=row * 977, temperature=1.5)) for row in (0, 2, 5)]
    assert run(make_sampler(), 7, params, steps, others) == alone
    assert run(make_sampler(), 1, params, steps, others[1:]) == alone
    assert run(make_sampler(), 0, SamplingParams(seed=12, top_p=0.9, presence_penalty=0.5), steps) != alone


def test_a_preempted_row_goes_on_as_if_it_had_stayed():
    params = SamplingParams(seed=5, frequency_penalty=1.0, repetition_penalty=1.3, min_tokens=6)
    steps = [logits_of(1, seed=step)[0] for step in range(10)]
    whole = run(make_sampler(), 0, params, steps)
    sampler = make_sampler()
    first = run(sampler, 0, params, steps[:4])
    sampler.clear_row(0)
    sampler.set_row(6, params, [2, 3], first)
    rest = [int(sampler.sample(logits[None].clone(), [6]).ids_R[0]) for logits in steps[4:]]
    assert first + rest == whole


def penalized(logits, params, prompt, output):
    """The formulas of the API references, token by token."""
    edited = [float(value) for value in logits]
    for token, given in enumerate(logits.tolist()):
        count, value = output.count(token), given
        if count or token in prompt:
            value = given / params.repetition_penalty if given > 0 else given * params.repetition_penalty
        edited[token] = value - count * params.frequency_penalty - (count > 0) * params.presence_penalty
    return edited


@pytest.mark.parametrize(
    "params",
    [
        greedy(repetition_penalty=1.5),
        greedy(presence_penalty=0.7),
        greedy(frequency_penalty=-0.4),
        greedy(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.3),
    ],
)
def test_penalties_follow_their_formulas(params):
    seen = []
    sampler = make_sampler(seen=seen)
    prompt, output = [2, 3, 3, 40], [5, 5, 5, 9, 3]
    sampler.set_row(2, params, prompt, output)
    sampler.set_row(4, greedy(), prompt, output)
    logits = logits_of(2)
    token = int(sampler.sample(logits.clone(), [4, 2]).ids_R[1])
    edited, _ = seen[0]
    assert torch.equal(edited[0], logits[0])
    np.testing.assert_allclose(edited[1], penalized(logits[1], params, prompt, output), rtol=1e-5, atol=1e-6)
    again = logits_of(2, seed=9)
    sampler.sample(again.clone(), [4, 2])
    expected = penalized(again[1], params, prompt, [*output, token])
    np.testing.assert_allclose(seen[1][0][1], expected, rtol=1e-5, atol=1e-6)


def test_a_slot_of_counts_is_clean_for_the_next_request():
    seen = []
    sampler = make_sampler(seen=seen)
    sampler.set_row(0, greedy(presence_penalty=2.0, repetition_penalty=2.0), [1, 2], [3, 3])
    sampler.sample(logits_of(1), [0])
    sampler.clear_row(0)
    sampler.set_row(0, greedy(presence_penalty=1.0), [9], [])
    logits = logits_of(1)
    sampler.sample(logits.clone(), [0])
    assert torch.equal(seen[1][0], logits)


def test_more_penalised_rows_than_one_block_of_counts():
    sampler = make_sampler(capacity=20)
    logits = logits_of(20)
    for row in range(20):
        sampler.set_row(row, greedy(presence_penalty=2.0), [1], [int(logits[row].argmax())])
    expected = [
        int(torch.tensor(penalized(logits[r], greedy(presence_penalty=2.0), [1], [int(logits[r].argmax())])).argmax())
        for r in range(20)
    ]
    assert sampler.sample(logits.clone(), range(20)).ids_R.tolist() == expected


def test_biases_are_added_and_bans_ban():
    sampler = make_sampler()
    logits = logits_of(2)
    best = int(logits[1].argmax())
    sampler.set_row(0, greedy(logit_bias={7: 100.0}), [1], [])
    sampler.set_row(1, greedy(logit_bias={best: -math.inf}), [1], [])
    ids = sampler.sample(logits.clone(), [0, 1]).ids_R.tolist()
    without = logits[1].clone()
    without[best] = -math.inf
    assert ids == [7, int(without.argmax())]


def test_stop_tokens_are_suppressed_before_min_tokens():
    sampler = make_sampler()
    sampler.set_row(0, greedy(min_tokens=2), [1], [], stop_ids=[1, 8])
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 8], logits[0, 20] = 3.0, 2.0, 1.0
    assert [int(sampler.sample(logits.clone(), [0]).ids_R[0]) for _ in range(3)] == [20, 20, 1]


class Alternating:
    """Allows even tokens, then odd ones, and so on."""

    def __init__(self):
        self.step = 0

    def fill(self, bitmask):
        assert bitmask.dtype == np.int32
        assert bitmask.shape == (2,)
        for token in range(self.step % 2, V, 2):
            bitmask[token // 32] |= np.array(1 << (token % 32), dtype=np.uint32).view(np.int32)

    def accept(self, token_id):
        self.step += 1
        return True


def test_masks_allow_what_their_matcher_says():
    sampler = make_sampler()
    matcher = Alternating()
    sampler.set_row(0, SamplingParams(seed=3), [1], [])
    sampler.set_row(5, SamplingParams(seed=4), [1], [], matcher=matcher)
    parities = []
    for step in range(20):
        token = int(sampler.sample(logits_of(2, seed=step), [0, 5]).ids_R[1])
        parities.append(token % 2)
        matcher.accept(token)
    assert parities == [0, 1] * 10


def test_a_row_of_nan_fails_and_the_others_live():
    sampler = make_sampler()
    for row in range(3):
        sampler.set_row(row, SamplingParams(seed=row, presence_penalty=1.0, logprobs=2), [1], [])
    logits = logits_of(3)
    expected = make_sampler()
    for row in range(3):
        expected.set_row(row, SamplingParams(seed=row, presence_penalty=1.0, logprobs=2), [1], [])
    good = expected.sample(logits.clone(), [0, 1, 2]).ids_R.tolist()
    logits[1] = math.nan
    sampled = sampler.sample(logits, [0, 1, 2])
    assert sampled.ids_R.tolist() == [good[0], -1, good[2]]


def test_logprobs_are_the_models_before_edits():
    sampler = make_sampler()
    sampler.set_row(0, greedy(), [1], [])
    sampler.set_row(1, greedy(logprobs=3, logit_bias={7: 100.0}), [1], [])
    sampler.set_row(2, greedy(logprobs=0), [1], [])
    logits = logits_of(3)
    found = sampler.sample(logits.clone(), [0, 1, 2]).logprobs.to_host()
    assert set(found) == {1, 2}
    exact = torch.log_softmax(logits.double(), -1)
    assert found[1].token_id == 7
    assert found[1].logprob == pytest.approx(exact[1, 7].item(), rel=1e-5)
    order = sorted(range(V), key=lambda token: -float(exact[1, token]))[:3]
    assert [token for token, _ in found[1].top] == order
    np.testing.assert_allclose([value for _, value in found[1].top], exact[1, order], rtol=1e-5)
    assert found[2].top == ()
    assert found[2].token_id == int(logits[2].argmax())


def test_equal_logprobs_come_with_the_lower_id_first():
    sampler = make_sampler()
    sampler.set_row(0, greedy(logprobs=50), [1], [])
    found = sampler.sample(torch.zeros(1, V), [0]).logprobs.to_host()[0]
    assert [token for token, _ in found.top] == list(range(V))


def test_minus_infinity_is_valid_json():
    # sgl-project/sglang#4097
    sampler = make_sampler()
    sampler.set_row(0, greedy(logprobs=2), [1], [])
    logits = torch.full((1, V), -math.inf)
    logits[0, 4] = 1.0
    found = sampler.sample(logits, [0]).logprobs.to_host()[0]
    assert found.top[1][1] == -math.inf
    assert json.loads(json.dumps([json_logprob(value) for _, value in found.top], allow_nan=False)) == [0, JSON_FLOOR]
    assert json_logprob(math.nan) == JSON_FLOOR


def test_given_tokens_are_scored():
    logits = logits_of(4)
    targets = torch.tensor([3, 1, 4, 1], dtype=torch.int32)
    found = make_sampler().score(logits, targets, 2).to_host()
    exact = torch.log_softmax(logits.double(), -1)
    for row, target in enumerate(targets.tolist()):
        assert found[row].token_id == target
        assert found[row].logprob == pytest.approx(exact[row, target].item(), rel=1e-5)
        assert len(found[row].top) == 2


def test_buffers_keep_their_place_and_follow_the_rows():
    seen = []
    sampler = make_sampler(seen=seen)
    for row, temperature in ((0, 0.5), (1, 0.7), (2, 0.9)):
        sampler.set_row(row, SamplingParams(seed=row, temperature=temperature), [1], [0] * row)
    where = []
    for rows in ([0, 1, 2], [0, 1, 2], [2, 0], [1]):
        sampler.sample(logits_of(len(rows)), rows)
        batch = seen[-1][1]
        where.append(tuple(getattr(batch, name).data_ptr() for name in vars(batch)))
        expected = torch.tensor([(0.5, 0.7, 0.9)[row] for row in rows])
        assert torch.equal(batch.temperature_R, expected)
        assert batch.seeds_R.tolist() == rows
    assert len(set(where)) == 1
    assert seen[-1][1].counters_R.tolist() == [4]  # one token before, three drawn, counters advance after each draw


def test_taken_and_free_rows_are_told_apart():
    sampler = make_sampler()
    sampler.set_row(0, greedy(), [1], [])
    with pytest.raises(AssertionError, match="row 0 is taken"):
        sampler.set_row(0, greedy(), [1], [])
    with pytest.raises(AssertionError, match="row 1 is free"):
        sampler.sample(logits_of(1), [1])
    sampler.clear_row(0)
    sampler.clear_row(0)
