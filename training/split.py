"""Which part of the lessons something belongs to, and where its randomness comes from.

Every lesson names what it teaches with canonical keys ("add:17:25", "code:red fox:42"). The hash
of a key alone decides whether it belongs to the training or to the held-out part, so the two
parts cannot share one, whatever the seeds are and in whatever order items are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Literal, TypeVar

__all__ = ["HELD_OUT_SHARE", "Split", "draw", "random_for", "split_of"]

Split = Literal["train", "held_out"]
T = TypeVar("T")

HELD_OUT_SHARE = 26 / 256
_HELD_OUT_BYTES = 26
_MAX_TRIES = 2000


def split_of(key: str) -> Split:
    """Return the part that owns this key; about a tenth of all keys is held out."""
    first = blake2b(key.encode(), digest_size=1, person=b"halocline-split").digest()[0]
    return "held_out" if first < _HELD_OUT_BYTES else "train"


def random_for(seed: int, lesson: str, split: Split, index: int) -> Random:
    """Return the generator of one item; equal arguments give equal items on every machine."""
    digest = blake2b(f"{seed}/{lesson}/{split}/{index}".encode(), digest_size=8).digest()
    return Random(int.from_bytes(digest, "little"))


def draw(rng: Random, split: Split, make: Callable[[Random], tuple[T, str]]) -> tuple[T, str]:
    """Draw (value, key) pairs from `make` until one belongs to the wanted part.

    Raises:
        RuntimeError: If `make` seems to have no key in that part.
    """
    for _ in range(_MAX_TRIES):
        value, key = make(rng)
        if split_of(key) == split:
            return value, key
    raise RuntimeError(f"no {split} key in {_MAX_TRIES} draws, the last one was {key!r}; widen the lesson's choices")
