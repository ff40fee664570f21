"""Marks without decoding: the right answers are read, and each token is asked for what the model thought of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halocline.engine.evaluation import prompt_of
from halocline.engine.grading import Exercise
from halocline.engine.llm import LLM
from halocline.engine.sampling_params import SamplingParams


class Reading(NamedTuple):
    """How a model reads one right answer, reasoning and end token included.

    `nll` is its negative log-likelihood in nats; `is_greedy` says that greedy decoding would write exactly it.
    """

    exercise: Exercise
    nll: float
    is_greedy: bool


def read_answers(llm: LLM, suite: Sequence[Exercise]) -> list[Reading]:
    prompts, sizes = [], []
    for exercise in suite:
        target = llm.tokenizer.encode_with_control_tokens(exercise.target)
        prompts.append([*prompt_of(llm.render_chat, exercise), *target])
        sizes.append(len(target))
    results = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=1), progress=False)
    readings = []
    for exercise, result, size in zip(suite, results, sizes, strict=True):
        assert result.prompt_logprobs is not None
        answer = result.prompt_logprobs[-size:]
        is_greedy = all(entry.top[0][0] == entry.token_id for entry in answer)
        readings.append(Reading(exercise, -sum(entry.logprob for entry in answer), is_greedy))
    return readings


def greedy_share(readings: Sequence[Reading]) -> float:
    return sum(reading.is_greedy for reading in readings) / len(readings)


def mean_nll(readings: Sequence[Reading]) -> float:
    return sum(reading.nll for reading in readings) / len(readings)
