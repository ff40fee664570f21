"""Running a suite of exercises through the engine, all of them together, and measuring plain text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halocline.engine.grading import MAX_NEW_TOKENS, Exercise, LessonScore, grade, score
from halocline.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from halocline.engine.llm import LLM
    from halocline.engine.prompt import ChatPrompt

__all__ = ["Evaluation", "Mark", "evaluate", "perplexity", "prompt_of", "read_prompts"]

_EFFORT = "low"  # of thinking turns: it adds no text to the prompt


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One marked answer.

    Attributes:
        exercise: What was asked.
        output: What the model wrote, as raw text without the end token.
        is_right: Whether it is the expected answer and came to an end.
    """

    exercise: Exercise
    output: str
    is_right: bool

    def to_json(self) -> dict[str, Any]:
        """Values that `agreement.load_answers` reads."""
        return {
            "name": self.exercise.name,
            "lesson": self.exercise.lesson,
            "is_right": self.is_right,
            "output": self.output,
        }


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A marked suite.

    Attributes:
        marks: In the order of the suite.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: Of these, how many the prefix cache held.
        completion_tokens: Tokens generated.
        seconds: From the first request until the last answer.
    """

    marks: tuple[Mark, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float

    @property
    def score(self) -> float:
        """Share of right answers."""
        return sum(mark.is_right for mark in self.marks) / len(self.marks)

    @property
    def lessons(self) -> dict[str, LessonScore]:
        """Right answers of each lesson, in the order of the suite."""
        return score([mark.exercise for mark in self.marks], [mark.is_right for mark in self.marks])

    def to_json(self) -> dict[str, Any]:
        """Score, lessons, counts and every answer."""
        lessons = {
            name: {"score": one.share, "right": one.right, "total": one.total} for name, one in self.lessons.items()
        }
        return {
            "score": self.score,
            "lessons": lessons,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": round(self.seconds, 2),
            "answers": [mark.to_json() for mark in self.marks],
        }


def prompt_of(render: Callable[..., ChatPrompt], exercise: Exercise) -> tuple[int, ...]:
    """The prompt of an exercise; `render` is `Prompter.chat`, or `LLM.render_chat` of a loaded model."""
    chat = render(exercise.messages, tools=exercise.tools, thinking=exercise.thinking, effort=_EFFORT)
    return chat.token_ids


def evaluate(llm: LLM, suite: Sequence[Exercise], *, progress: bool | None = None) -> Evaluation:
    """Answers every exercise greedily, all of them together, and marks the answers.

    Prompts go in as ids and answers come out as raw text, so that the marking sees the markup that the model wrote
    and not what a parser made of it.

    Args:
        llm: The model under test.
        suite: At least one exercise.
        progress: Whether to draw a bar; None draws it if stderr is a terminal.
    """
    start = time.monotonic()
    prompts = [prompt_of(llm.render_chat, exercise) for exercise in suite]
    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)
    results = llm.generate(prompts, params, progress=progress)
    marks = []
    for exercise, result in zip(suite, results, strict=True):
        output = result.outputs[0]
        is_right = output.finish_reason == "stop" and grade(exercise, output.text)
        marks.append(Mark(exercise=exercise, output=output.text, is_right=is_right))
    return Evaluation(
        marks=tuple(marks),
        prompt_tokens=sum(result.usage.prompt_tokens for result in results),
        cached_tokens=sum(result.usage.cached_tokens for result in results),
        completion_tokens=sum(result.usage.completion_tokens for result in results),
        seconds=time.monotonic() - start,
    )


def read_prompts(llm: LLM, suite: Sequence[Exercise], *, progress: bool | None = None) -> None:
    """Reads every prompt of a suite, so that an evaluation after it finds them in the prefix cache."""
    prompts = [prompt_of(llm.render_chat, exercise) for exercise in suite]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), progress=progress)


def perplexity(llm: LLM, texts: Sequence[str], *, progress: bool | None = None) -> float:
    """Exponential of the mean negative log-likelihood of the texts' tokens, each text read after one BOS."""
    results = llm.generate(list(texts), SamplingParams(max_tokens=0, prompt_logprobs=0), progress=progress)
    values = [entry.logprob for result in results for entry in result.prompt_logprobs or ()]
    return math.exp(-sum(values) / len(values))
