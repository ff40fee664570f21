"""The reference sampler against published vectors, float64 oracles and its promises."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from halocline.backends_reference.cases_sampling import cases
from halocline.backends_reference.sampling import gumbel_noise, gumbel_of_words, philox_4x32, restrict, sample_reference
from halocline.hal.errors import ShapeError
from halocline.hal.ops.sampling import SamplingBatch


def batch_of(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=7, counters=0):
    def full(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).clone()

    return SamplingBatch(
        temperature_R=full(temperature, torch.float32),
        top_k_R=full(top_k, torch.int32),
        top_p_R=full(top_p, torch.float32),
        min_p_R=full(min_p, torch.float32),
        seeds_R=full(seeds, torch.int64),
        counters_R=full(counters, torch.int64),
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Random123's published known-answer vectors of philox4x32-10.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, expected):
    words = philox_4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_noise_takes_word_and_counter_of_each_token_as_stated():
    seed, count = -3, 2**32 + 5
    noise = gumbel_noise(seed, count, 11)
    for token in (0, 3, 4, 10):
        counter = (torch.tensor([token // 4]), torch.tensor([5]), torch.tensor([1]), torch.tensor([0]))
        word = int(philox_4x32(counter, (0xFFFFFFFD, 0xFFFFFFFF))[token % 4])
        uniform = (word + 0.5) / 2**32
        assert noise[token].item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-6)


def test_noise_is_finite_and_falls_over_the_whole_range_of_words():
    words = torch.tensor([0, 1, 2**8, 2**24, 2**31, 2**32 - 2**8, 2**32 - 1])
    noise = gumbel_of_words(words)
    assert noise.isfinite().all()
    assert (noise[:-1] >= noise[1:]).all()
    assert noise[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)  # -log(2 ** -33)


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample_reference(logits, batch_of(2, temperature=0.0)).tolist() == [1, 0]


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    temperature, draws = 0.8, 4000
    ids = sample_reference(logits.expand(draws, 5), batch_of(draws, temperature=temperature, counters=range(draws)))
    counts = np.bincount(ids.numpy(), minlength=5)
    weights = np.exp(logits.double().numpy() / temperature)
    expected = draws * weights / weights.sum()
    assert counts[4] == 0
    chi_square = ((counts[:4] - expected[:4]) ** 2 / expected[:4]).sum()
    assert chi_square < 16.3  # 99.9 % of a chi-square with 3 degrees of freedom


def test_draws_over_seeds_are_independent_of_those_over_counters():
    logits = torch.zeros(2000, 2)
    by_count = sample_reference(logits, batch_of(2000, counters=range(2000)))
    by_seed = sample_reference(logits, batch_of(2000, seeds=range(2000)))
    for ids in (by_count, by_seed):
        assert abs(ids.float().mean().item() - 0.5) < 3.3 * 0.5 / math.sqrt(2000)
    agreement = (by_count == by_seed).float().mean().item()
    assert abs(agreement - 0.5) < 3.3 * 0.5 / math.sqrt(2000)


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """Ids kept, in float64 and by sorting, written independently of the code under test."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    shares = weights / weights.sum()
    if top_p < 1.0:
        length, total = 0, 0.0
        while total < top_p:
            total += shares[length]
            length += 1
        order, shares = order[:length], shares[:length]
    return {token for token, share in zip(order, shares, strict=True) if share >= min_p * shares[0]}


@pytest.mark.parametrize("top_k", [0, 1, 5, 400])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_restriction_equals_a_float64_oracle(top_k, top_p, min_p):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 2
    kept = restrict(logits, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = kept_by_sorting(logits.numpy(), 0.7, min(top_k, 300), top_p, min_p)
    assert set(kept.isfinite().nonzero()[:, 0].tolist()) == expected
    assert torch.equal(kept[kept.isfinite()], (logits / 0.7)[kept.isfinite()])


def test_top_p_is_taken_of_what_top_k_kept():
    # Shares 0.4 0.3 0.2 0.1: of the first two, 0.57 and 0.43; top_p 0.5 keeps one, of all four it would keep two.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert restrict(logits, temperature=1.0, top_k=2, top_p=0.5, min_p=0.0).isfinite().tolist() == [1, 0, 0, 0]


def test_tokens_tied_with_the_last_one_kept_are_kept():
    logits = torch.tensor([1.0, 0.0, 0.0, -1.0])
    assert restrict(logits, temperature=1.0, top_k=2, top_p=1.0, min_p=0.0).isfinite().tolist() == [1, 1, 1, 0]


def test_only_kept_tokens_are_drawn():
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1))
    kept = kept_by_sorting(logits.numpy(), 1.0, 3, 1.0, 0.0)
    ids = sample_reference(logits.expand(300, 200), batch_of(300, top_k=3, counters=range(300)))
    assert set(ids.tolist()) == kept


def test_a_draw_depends_on_the_row_alone():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    seeds, counters = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([0, 7, 2, 8, 1, 8])
    together = sample_reference(logits, batch_of(6, top_p=0.95, seeds=seeds, counters=counters))
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    shuffled = sample_reference(logits[order], batch_of(6, top_p=0.95, seeds=seeds[order], counters=counters[order]))
    assert torch.equal(shuffled, together[order])
    for row in range(6):
        alone = sample_reference(
            logits[row : row + 1], batch_of(1, top_p=0.95, seeds=seeds[row], counters=counters[row])
        )
        assert alone[0] == together[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_fails_alone(temperature):
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(3))
    good = sample_reference(logits, batch_of(4, temperature=temperature))
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    ids = sample_reference(logits, batch_of(4, temperature=temperature))
    assert ids.tolist() == [good[0].item(), -1, -1, -1]
    assert ids.dtype == torch.int32


def test_one_allowed_token_is_always_drawn():
    logits = torch.full((50, 64), -torch.inf)
    logits[:, 33] = -80.0
    assert set(sample_reference(logits, batch_of(50, counters=range(50))).tolist()) == {33}


def test_no_rows_give_no_ids():
    assert sample_reference(torch.empty(0, 16), batch_of(0)).tolist() == []


def test_rows_that_differ_are_refused():
    with pytest.raises(ShapeError, match="3 rows"):
        sample_reference(torch.zeros(3, 8), batch_of(2))


def test_cases_are_mostly_decided():
    """A case whose rows were all masked as undecided would compare nothing."""
    ops = SimpleNamespace(sampling=SimpleNamespace(sample=sample_reference))
    names = set()
    for case in cases():
        ids = case.run(ops, "cpu")["ids"]
        names.add(case.name)
        assert (ids == -2).float().sum() <= 0.3 * max(len(ids), 1), case.name
        if case.name == "failed_rows":
            assert ids[0] == ids[1] == -1 != ids[2]
    assert "empty" in names
