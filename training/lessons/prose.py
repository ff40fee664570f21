"""Plain English: the filler between the things to remember, and text for perplexity."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from halocline.training.lessons.words import (
    COLOURS,
    FOODS,
    JOBS,
    NAMES,
    PLACES,
    SKIES,
    THINGS,
    TIMES,
    TOWNS,
)
from halocline.training.split import Split, draw, random_for

__all__ = ["filler", "make_text", "num_words", "sentence"]

_MOVES = ("walks", "runs", "comes", "goes")
_RESTS = ("sits", "waits", "sleeps", "sings", "reads", "works", "rests")


def _walk(rng: Random) -> str:
    return f"The {rng.choice(JOBS)} {rng.choice(_MOVES)} to the {rng.choice(PLACES)}."


def _rest(rng: Random) -> str:
    return f"{rng.choice(NAMES)} {rng.choice(_RESTS)} by the {rng.choice(PLACES)}."


def _time(rng: Random) -> str:
    return f"In the {rng.choice(TIMES)} the {rng.choice(JOBS)} {rng.choice(_RESTS)} in the {rng.choice(PLACES)}."


def _sky(rng: Random) -> str:
    return f"It is {rng.choice(SKIES)} in {rng.choice(TOWNS)}."


def _meal(rng: Random) -> str:
    one, two = rng.sample(NAMES, 2)
    return f"{one} and {two} eat {rng.choice(FOODS)} at the {rng.choice(PLACES)}."


def _thing(rng: Random) -> str:
    return f"The {rng.choice(COLOURS)} {rng.choice(THINGS)} of {rng.choice(NAMES)} is at the {rng.choice(PLACES)}."


def _trip(rng: Random) -> str:
    start, end = rng.sample(TOWNS, 2)
    return f"{rng.choice(NAMES)} {rng.choice(_MOVES)} from {start} to {end}."


_FORMS: tuple[Callable[[Random], str], ...] = (_walk, _rest, _time, _sky, _meal, _thing, _trip)


def sentence(rng: Random) -> str:
    """Return one sentence, without a digit and without an animal: it never looks like a code."""
    return rng.choice(_FORMS)(rng)


def num_words(text: str) -> int:
    """Count words and full stops, which is close to the number of tokens."""
    return text.count(" ") + 1 + text.count(".")


def filler(rng: Random, num_tokens: int) -> list[str]:
    """Return sentences of about `num_tokens` tokens in all."""
    sentences: list[str] = []
    while num_tokens > 0:
        sentences.append(sentence(rng))
        num_tokens -= num_words(sentences[-1])
    return sentences


def _story(rng: Random) -> str:
    """Return a short story about one person, whose name and town come back in it."""
    name, friend = rng.sample(NAMES, 2)
    job, town, place, thing = rng.choice(JOBS), rng.choice(TOWNS), rng.choice(PLACES), rng.choice(THINGS)
    food, time, colour, sky = rng.choice(FOODS), rng.choice(TIMES), rng.choice(COLOURS), rng.choice(SKIES)
    lines = [
        f"{name} is a {job} in {town}.",
        f"It is {sky} in {town}, and the {job} {rng.choice(_MOVES)} to the {place}.",
        f"At the {place} {name} has a {colour} {thing}.",
        f"In the {time} {friend} comes to the {place} and asks for the {colour} {thing}.",
        f"{name} and {friend} eat {food} by the {place}.",
        f"Then {friend} goes home with the {colour} {thing}, and {name} {rng.choice(_RESTS)} in {town}.",
    ]
    kept = [line for line in lines[1:] if rng.random() < 0.85]
    return " ".join([lines[0], *kept])


def make_text(seed: int, index: int, split: Split, *, num_stories: int = 4) -> str:
    """Return plain text: a few stories, each owned by this part of the lessons."""
    rng = random_for(seed, "text", split, index)

    def one(source: Random) -> tuple[str, str]:
        story = _story(source)
        return story, f"text:{story}"

    return "\n".join(draw(rng, split, one)[0] for _ in range(num_stories))
