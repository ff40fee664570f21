"""Bad parameters are refused by name; admission checks them against a model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halocline.engine.admission import ModelLimits, admit
from halocline.engine.sampling_params import FieldError, SamplingParams, choice_seed
from halocline.hal.errors import InputError, RequestError

LIMITS = ModelLimits(vocab_size=100, max_tokens=50, eos_ids=(1,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("seed", 2**63),
        ("seed", 1.0),
        ("n", 0),
        ("n", 129),
        ("logprobs", -1),
        ("logprobs", 65),
        ("prompt_logprobs", True),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("ignore_eos", 1),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(FieldError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(name)
    assert "asked" in str(caught.value)
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 2


def test_limits_themselves_are_accepted():
    SamplingParams(
        temperature=0, top_p=1, min_p=0.999, presence_penalty=-2, frequency_penalty=2, seed=-(2**63), max_tokens=0
    )
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")


def test_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(FieldError, match="must not exceed max_tokens=3"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_parameters_keep_their_own_copy():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}


def test_seeds_of_choices_differ_and_are_fixed():
    assert choice_seed(7, 0) == 7
    assert len({choice_seed(seed, index) for seed in (0, 1, -1, 2**63 - 1) for index in range(32)}) == 128
    # SplitMix64 of state 0 gives this for its first output: published with the algorithm.
    assert choice_seed(0, 1) % 2**64 == 0xE220A8397B1DCDAF
    assert all(-(2**63) <= choice_seed(5, index) < 2**63 for index in range(100))


@pytest.mark.parametrize("prompt", [[100], [-1], [5, 2**31, 7], [3, True], [1.0], ["a"], [5, None]])
def test_ids_outside_the_vocabulary_are_refused_on_both_sides(prompt):
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        admit(prompt, SamplingParams(), LIMITS)
    assert "0 to 99" in str(caught.value)


def test_ids_at_both_ends_and_of_numpy_are_accepted():
    admitted = admit(np.array([0, 99], dtype=np.int32), SamplingParams(), LIMITS)
    assert admitted.prompt_ids == (0, 99)
    assert {type(token_id) for token_id in admitted.prompt_ids} == {int}


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt is empty"):
        admit([], SamplingParams(), LIMITS)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_other_ids_are_checked_as_well(field):
    value = {100: 1.0} if field == "logit_bias" else [100]
    with pytest.raises(FieldError, match="outside the vocabulary") as caught:
        admit([5], SamplingParams(**{field: value}), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("length", "asked", "given"),
    [(10, None, 40), (10, 40, 40), (10, 0, 0), (50, 0, 0), (49, None, 1), (49, 1, 1)],
)
def test_max_tokens_is_what_was_asked_or_what_fits(length, asked, given):
    assert admit([5] * length, SamplingParams(max_tokens=asked), LIMITS).max_tokens == given


@pytest.mark.parametrize("length", [10, 50])
def test_more_than_the_context_is_refused_with_the_numbers(length):
    with pytest.raises(FieldError) as caught:
        admit([5] * length, SamplingParams(max_tokens=51 - length), LIMITS)
    assert caught.value.field == "max_tokens"
    assert "50" in str(caught.value)
    assert str(length) in str(caught.value)


def test_a_prompt_that_fills_the_context_needs_max_tokens_zero():
    with pytest.raises(RequestError, match="no room for output"):
        admit([5] * 50, SamplingParams(), LIMITS)
    with pytest.raises(RequestError, match="longer than the context"):
        admit([5] * 51, SamplingParams(max_tokens=0), LIMITS)


def test_min_tokens_beyond_the_context_is_refused():
    with pytest.raises(FieldError, match="40 tokens that fit"):
        admit([5] * 10, SamplingParams(min_tokens=41), LIMITS)


def test_stop_ids_are_the_models_and_the_requests():
    assert admit([5], SamplingParams(stop_token_ids=[7, 1, 7]), LIMITS).stop_ids == (1, 7)
    assert admit([5], SamplingParams(stop_token_ids=[7], ignore_eos=True), LIMITS).stop_ids == (7,)


def test_a_request_without_a_seed_gets_one_of_its_own():
    seeds = {admit([5], SamplingParams(), LIMITS).seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert admit([5], SamplingParams(seed=-4), LIMITS).seed == -4
