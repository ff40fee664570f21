"""Sampling against a sorted softmax and Philox in Python's own integers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halocline.kernels_portable.sampling_draw import draw_parts
from halocline.kernels_portable.sampling_pick import sample_tokens
from halocline.kernels_portable.sampling_threshold import sampling_thresholds

NONE = dict(top_k=0, top_p=1.0, min_p=0.0)


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds, as in Salmon et al. 2011."""
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (product_1 >> 32) ^ counter[1] ^ key[0],
            product_1 & 0xFFFFFFFF,
            (product_0 >> 32) ^ counter[3] ^ key[1],
            product_0 & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def _noise(token: int, seed: int, count: int) -> float:
    seed, count = seed % 2**64, count % 2**64
    words = _philox([token // 4, count & 0xFFFFFFFF, count >> 32, 0], [seed & 0xFFFFFFFF, seed >> 32])
    as_float = float(torch.tensor(words[token % 4], dtype=torch.float64).float())
    u = min(float(torch.tensor(as_float + 0.5).float()) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def _kept(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that remain, in plain Python over a sorted list."""
    scaled = [x / temperature for x in logits.tolist()]
    floor = sorted(scaled, reverse=True)[top_k - 1] if top_k else -math.inf
    kept = [i for i, x in enumerate(scaled) if x >= floor]
    top = max(scaled)
    mass = {i: math.exp(scaled[i] - top) for i in kept}
    total = sum(mass.values())
    kept = [i for i in kept if sum(m for j, m in mass.items() if scaled[j] > scaled[i]) / total < top_p]
    return [i for i in kept if math.exp(scaled[i] - top) >= min_p]


def _rows(**columns: list[float]) -> dict[str, Tensor]:
    kinds = {"top_k": torch.int32, "seeds": torch.int64, "counters": torch.int64}
    return {f"{name}_R": torch.tensor(values, dtype=kinds.get(name, torch.float32)) for name, values in columns.items()}


def _sample(logits: Tensor, temperature: float = 1.0, seed: int = 0, count: int = 0, **limits: float) -> Tensor:
    r = logits.shape[0]
    limits = {**NONE, **limits}
    return sample_tokens(
        logits, **_rows(temperature=[temperature] * r, top_k=[limits["top_k"]] * r, top_p=[limits["top_p"]] * r,
        min_p=[limits["min_p"]] * r, seeds=[seed] * r, counters=[count] * r)
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [5, 1000, 9001])
def test_greedy_takes_the_lowest_of_the_largest(vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[1, [vocabulary - 1, vocabulary - 2]] = 50.0
    expected = [int(row.argmax()) for row in logits]
    expected[1] = vocabulary - 2
    assert _sample(logits, temperature=0.0).tolist() == expected
    assert _sample(logits, temperature=0.0).dtype == torch.int32


@pytest.mark.parametrize(("seed", "count"), [(0, 0), (1, 3), (-1, 7), (0x123456789ABCDEF, 2**33 + 5)])
def test_draws_are_the_largest_logit_plus_named_noise(seed: int, count: int) -> None:
    vocabulary = 403
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    for row, found in enumerate(_sample(logits, temperature=0.7, seed=seed, count=count).tolist()):
        values = [float(logits[row, i]) / 0.7 + _noise(i, seed, count) for i in range(vocabulary)]
        assert found == max(range(vocabulary), key=values.__getitem__)


def test_the_noise_itself() -> None:
    """With equal logits, the best value of a part is its largest noise, to float32's last bits."""
    vocabulary, seed, count = 64, 42, 9
    parts = draw_parts(
        torch.zeros(1, vocabulary),
        torch.ones(1),
        torch.full((1,), -torch.inf),
        torch.tensor([seed]),
        torch.tensor([count]),
    )
    noises = [_noise(i, seed, count) for i in range(vocabulary)]
    assert float(parts.values_RC[0, 0]) == pytest.approx(max(noises), rel=1e-6)
    assert int(parts.ids_RC[0, 0]) == noises.index(max(noises))


@pytest.mark.parametrize(
    "limits",
    [
        dict(top_k=1), dict(top_k=7), dict(top_k=300), dict(top_p=0.5), dict(top_p=0.95), dict(top_p=1e-6),
        dict(min_p=0.1), dict(top_k=20, top_p=0.8), dict(top_k=40, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
def test_thresholds_keep_exactly_the_right_ids(limits: dict[str, float], temperature: float) -> None:
    logits = (torch.randn(2, 300, generator=torch.Generator().manual_seed(2)) * 3 - 4).round(decimals=3)
    limits = {**NONE, **limits}
    thresholds = sampling_thresholds(
        logits, **_rows(temperature=[temperature] * 2, **{name: [value] * 2 for name, value in limits.items()})
    )
    for row in range(2):
        kept = (logits[row] / temperature >= thresholds[row]).nonzero()[:, 0].tolist()
        assert kept == _kept(logits[row], temperature, int(limits["top_k"]), limits["top_p"], limits["min_p"])


def test_equals_of_the_smallest_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    thresholds = sampling_thresholds(logits, **_rows(temperature=[1.0], top_k=[2], top_p=[1.0], min_p=[0.0]))
    assert (logits[0] >= thresholds).tolist() == [False, True, True, True, True, False]


def test_rows_that_cannot_be_sampled_give_minus_one() -> None:
    logits = torch.zeros(5, 20)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, :] = -torch.inf
    logits[3, 7] = -40.0
    for temperature in (0.0, 1.0):
        found = _sample(logits, temperature=temperature).tolist()
        assert found[:4] == [-1, -1, -1, 7]
        assert 0 <= found[4] < 20


def test_a_draw_depends_on_nothing_but_its_row() -> None:
    gen = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 500, generator=gen)
    seeds, counters = torch.tensor([3, 9, 3, 1]), torch.tensor([0, 4, 1, 1])
    columns = _rows(temperature=[1.0, 0.5, 0.0, 2.0], top_k=[0, 50, 0, 3], top_p=[0.9, 1.0, 1.0, 0.7], min_p=[0.0] * 4)
    together = sample_tokens(logits, **columns, seeds_R=seeds, counters_R=counters)
    for row in range(4):
        alone = {name: column[row : row + 1] for name, column in columns.items()}
        found = sample_tokens(
            logits[row : row + 1], **alone, seeds_R=seeds[row : row + 1], counters_R=counters[row : row + 1]
        )
        assert torch.equal(found, together[row : row + 1])


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(250, 4)
    r = logits.shape[0]
    found = sample_tokens(
        logits, **_rows(temperature=[1.0] * r, top_k=[0] * r, top_p=[1.0] * r, min_p=[0.0] * r, seeds=[7] * r),
        counters_R=torch.arange(r),
    )  # fmt: skip
    share = torch.bincount(found.long(), minlength=4) / r
    torch.testing.assert_close(share, torch.softmax(logits[0], 0), rtol=0, atol=0.08)
