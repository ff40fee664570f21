"""The shipped low-bit checkpoint answers held-out exercises, through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from halocline.engine.draft_acceptance import draft_acceptance
from halocline.engine.evaluation import evaluate
from halocline.engine.graded_model import text_file
from halocline.engine.grading import MAX_NEW_TOKENS, Exercise, load_texts
from halocline.engine.llm import LLM
from halocline.engine.loading import LoadOptions, prepare_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_score_of_the_release(graded: Path, check_suite: list[Exercise]) -> None:
    longest = max(exercise.prompt_tokens for exercise in check_suite) + MAX_NEW_TOKENS
    with LLM(graded, recipe="recipe", max_positions=longest, progress=False) as llm:
        evaluation = evaluate(llm, check_suite, progress=False)
    assert evaluation.score >= 0.90
    assert min(lesson.share for lesson in evaluation.lessons.values()) >= 0.80


def test_first_drafts_are_mostly_what_the_model_writes(graded: Path) -> None:
    prepared = prepare_model(LoadOptions(model=graded, recipe="recipe", max_positions=512))
    texts = [prepared.prompter.completion(text) for text in load_texts(text_file(graded))[:6]]
    loaded = prepared.load()
    assert draft_acceptance(prepared.checkpoint, loaded.recipe, loaded.kernels, texts, progress=False) >= 0.6
