"""Copying and reversing short rows of words, letters and digits."""

from __future__ import annotations

from random import Random

from halocline.training.item import Item, assistant, user
from halocline.training.lessons.mode import choose_mode, preamble
from halocline.training.lessons.words import ALL_PLAIN, LETTERS
from halocline.training.split import Split, draw, random_for

__all__ = ["make_copying"]

_DIGITS = tuple("0123456789")
_MAX_COPIED = 12
_MAX_REVERSED = 8
_THOUGHT = {"copy": "I write the same row again", "reverse": "I start from the end"}


def make_copying(seed: int, index: int, split: Split) -> Item:
    """Return one row of symbols to be repeated as it is, or from its end."""
    rng = random_for(seed, "copying", split, index)
    thinking, effort = choose_mode(rng, split, 0.25)
    kind = "copy" if rng.random() < 0.5 else "reverse"
    longest = _MAX_COPIED if kind == "copy" else _MAX_REVERSED

    def row(source: Random) -> tuple[list[str], str]:
        symbols = source.choice((ALL_PLAIN, LETTERS, LETTERS + _DIGITS))
        chosen = [source.choice(symbols) for _ in range(source.randint(3, longest))]
        return chosen, f"row:{min(chosen, chosen[::-1])}"

    chosen, key = draw(rng, split, row)
    answer = chosen if kind == "copy" else chosen[::-1]
    ask = "Repeat:" if kind == "copy" else "Reverse:"
    return Item(
        lesson="copying",
        kind=kind,
        messages=(*preamble(rng, split), user(f"{ask} {' '.join(chosen)}")),
        reply=assistant(" ".join(answer), _THOUGHT[kind] if thinking else None),
        keys=(key,),
        thinking=thinking,
        effort=effort,
    )
