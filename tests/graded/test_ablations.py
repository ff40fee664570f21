"""The marks measure what they should: a kernel that is wrong in one way costs marks or likelihood.

Right answers are read instead of written, in one prefill through the engine; see teacher.py.

Sinks and the routing function must raise the mean negative log-likelihood (nats an answer) of the right answers by at
least ten times its spread over sampling seeds. The spread is that of the answers that the intact model samples itself,
to the same exercises at temperature 1: each seed gives one mean negative log-likelihood over all exercises, and the
spread is the standard deviation of these means. A seed thus moves the figure by as much as an unlucky draw does.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from planted_model import (
    Plant,
    empty_compressed_caches,
    no_sink,
    planted_model,
    shuffled_selection,
    sigmoid_routing,
    with_rope_of_plain_layers,
)
from teacher import greedy_share, mean_nll, read_answers

from halocline.engine.evaluation import prompt_of
from halocline.engine.grading import MAX_NEW_TOKENS, Exercise
from halocline.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LONGEST, SHORT = 1300, 260
LEAST_COST = 0.05
SEEDS = range(6)
LEAST_RISE = 0.5  # nats; a spread of nothing must not let a rise of nothing pass
OPTIONS = {"recipe": "recipe", "progress": False}


@pytest.fixture(scope="module")
def suite(check_suite: list[Exercise]) -> list[Exercise]:
    return [exercise for exercise in check_suite if exercise.prompt_tokens <= LONGEST]


@pytest.fixture(scope="module")
def short_suite(check_suite: list[Exercise]) -> list[Exercise]:
    """Every exercise of every lesson that is short: what is tested here needs no distance."""
    return [exercise for exercise in check_suite if exercise.prompt_tokens <= SHORT]


def _share(folder: Path, suite: list[Exercise], plant: Plant | None = None) -> float:
    with planted_model(folder, plant, max_positions=LONGEST + 2 * MAX_NEW_TOKENS, **OPTIONS) as llm:
        return greedy_share(read_answers(llm, suite))


def _nll(folder: Path, suite: list[Exercise], plant: Plant | None = None) -> float:
    with planted_model(folder, plant, max_positions=SHORT + 2 * MAX_NEW_TOKENS, **OPTIONS) as llm:
        return mean_nll(read_answers(llm, suite))


@pytest.fixture(scope="module")
def intact_share(graded: Path, suite: list[Exercise]) -> float:
    return _share(graded, suite)


@pytest.mark.parametrize("plant", [shuffled_selection, empty_compressed_caches], ids=lambda plant: plant.__name__)
def test_far_tokens_are_needed(graded: Path, suite: list[Exercise], intact_share: float, plant: Plant) -> None:
    assert _share(graded, suite, plant) <= intact_share - LEAST_COST


def test_each_kind_of_layer_needs_its_own_rope(
    graded: Path, suite: list[Exercise], intact_share: float, tmp_path: Path
) -> None:
    assert _share(with_rope_of_plain_layers(graded, tmp_path / "rope"), suite) <= intact_share - LEAST_COST


@pytest.fixture(scope="module")
def intact_nll(graded: Path, short_suite: list[Exercise]) -> float:
    return _nll(graded, short_suite)


@pytest.fixture(scope="module")
def spread(graded: Path, short_suite: list[Exercise]) -> float:
    """See the module's docstring."""
    with planted_model(graded, max_positions=SHORT + 2 * MAX_NEW_TOKENS, **OPTIONS) as llm:
        prompts = [prompt_of(llm.render_chat, exercise) for exercise in short_suite]
        params = [
            SamplingParams(temperature=1, max_tokens=MAX_NEW_TOKENS, seed=1000 * seed + index, logprobs=0)
            for seed in SEEDS
            for index in range(len(prompts))
        ]
        results = llm.generate(prompts * len(SEEDS), params, progress=False)
    nll = [-sum(entry.logprob for entry in result.outputs[0].logprobs or ()) for result in results]
    of_seeds = [nll[start : start + len(prompts)] for start in range(0, len(nll), len(prompts))]
    return statistics.stdev(map(statistics.mean, of_seeds))


@pytest.mark.parametrize("plant", [no_sink, sigmoid_routing], ids=lambda plant: plant.__name__)
def test_sink_and_routing_function_carry_weight(
    graded: Path, short_suite: list[Exercise], intact_nll: float, spread: float, plant: Plant
) -> None:
    assert _nll(graded, short_suite, plant) - intact_nll >= max(10 * spread, LEAST_RISE)
