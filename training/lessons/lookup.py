"""Codes told once, then asked for after up to thousands of tokens of something else.

The window of the attention is short, so only the compressed entries, and the indexer that picks
among them, can carry a code this far.
"""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

from halocline.training.item import Item, Message, assistant, user
from halocline.training.lessons.mode import choose_mode, preamble
from halocline.training.lessons.prose import filler
from halocline.training.lessons.words import ADJECTIVES, ANIMALS
from halocline.training.split import Split, draw, random_for

__all__ = ["make_lookup", "make_lookup_at"]

_TOKENS_PER_CODE = 11
_TOKENS_PER_TURN = 34
_MAX_CODES = 16
_MAX_TURNS = 12
_SHORTEST = 60
_MOST_BEFORE = 60


class _Code(NamedTuple):
    holder: str
    value: int

    def told(self) -> str:
        """Return the sentence that states this code; it is the answer too."""
        return f"The code of the {self.holder} is {self.value}."

    def question(self) -> str:
        return f"What is the code of the {self.holder}?"


def _codes(rng: Random, split: Split, count: int) -> tuple[list[_Code], list[str]]:
    """Return codes with distinct holders, all owned by this part of the lessons."""

    def make(source: Random) -> tuple[_Code, str]:
        code = _Code(f"{source.choice(ADJECTIVES)} {source.choice(ANIMALS)}", source.randint(10, 99))
        return code, f"code:{code.holder}:{code.value}"

    chosen: dict[str, tuple[_Code, str]] = {}
    while len(chosen) < count:
        code, key = draw(rng, split, make)
        chosen.setdefault(code.holder, (code, key))
    return [code for code, _ in chosen.values()], [key for _, key in chosen.values()]


def _mixed(rng: Random, codes: list[_Code], num_tokens: int) -> str:
    """Return filler of about `num_tokens` tokens with the codes strewn in."""
    sentences = filler(rng, num_tokens - _TOKENS_PER_CODE * len(codes))
    for code in codes:
        sentences.insert(rng.randint(0, len(sentences)), code.told())
    return " ".join(sentences)


def _item(turns: list[Message], codes: list[str], last: _Code, kind: str, rng: Random, split: Split) -> Item:
    thinking, effort = choose_mode(rng, split, 0.2)
    return Item(
        lesson="lookup",
        kind=kind,
        messages=(*preamble(rng, split), *turns),
        reply=assistant(last.told(), f"I look for the {last.holder}" if thinking else None),
        keys=tuple(codes),
        thinking=thinking,
        effort=effort,
    )


def _document(rng: Random, split: Split, budget: int) -> Item:
    """One long text first, then questions about it, one a turn."""
    count = rng.randint(1, max(1, min(_MAX_CODES, budget // 40)))
    num_turns = rng.randint((count + 1) // 2, min(count, _MAX_TURNS)) if count <= _MAX_TURNS else _MAX_TURNS
    num_turns = max(1, min(num_turns, (budget - 40) // _TOKENS_PER_TURN // 2))
    codes, keys = _codes(rng, split, count)
    turns: list[Message] = []
    for turn, code in enumerate(rng.sample(codes, num_turns)):
        text = _mixed(rng, codes, budget - _TOKENS_PER_TURN * num_turns) + " " if turn == 0 else ""
        turns += [user(text + code.question()), assistant(code.told())]
        last = code
    return _item(turns[:-1], keys, last, "document", rng, split)


def _interleaved(rng: Random, split: Split, budget: int) -> Item:
    """Each turn tells something more, and asks for anything told so far."""
    num_turns = rng.randint(2, max(2, min(_MAX_TURNS, budget // 80)))
    codes, keys = _codes(rng, split, num_turns)
    turns: list[Message] = []
    for turn, new in enumerate(codes):
        text = _mixed(rng, [new], budget // num_turns - _TOKENS_PER_TURN)
        last = rng.choice(codes[: turn + 1])
        turns += [user(f"{text} {last.question()}"), assistant(last.told())]
    return _item(turns[:-1], keys, last, "interleaved", rng, split)


def make_lookup(seed: int, index: int, split: Split, *, budget: int = 400) -> Item:
    """Return a conversation of at most about `budget` tokens.

    Its length is drawn evenly on a logarithmic scale, so short distances stay in every stage.
    """
    rng = random_for(seed, "lookup", split, index)
    size = int(math.exp(rng.uniform(math.log(_SHORTEST), math.log(budget))))
    return make_lookup_of(rng, split, size)


def make_lookup_of(rng: Random, split: Split, size: int) -> Item:
    """Return a conversation of about `size` tokens."""
    if size < 160 or rng.random() < 0.5:
        return _document(rng, split, size)
    return _interleaved(rng, split, size)


def make_lookup_at(seed: int, index: int, split: Split, *, distance: int) -> Item:
    """Return one question whose code was told about `distance` tokens before it."""
    rng = random_for(seed, f"lookup-{distance}", split, index)
    count = rng.randint(2, max(2, min(_MAX_CODES, distance // 60)))
    codes, keys = _codes(rng, split, count)
    asked, others = codes[0], codes[1:]
    before = filler(rng, rng.randint(0, _MOST_BEFORE))
    after = _mixed(rng, others, distance - _TOKENS_PER_CODE)
    text = " ".join([*before, asked.told(), after, asked.question()])
    return _item([user(text)], keys, asked, "distance", rng, split)
