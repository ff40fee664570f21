"""How an exercise is asked: with or without thinking, and at which effort."""

from __future__ import annotations

from random import Random

from halocline.training.item import Effort
from halocline.training.split import Split

__all__ = ["choose_mode"]

_HIGH_SHARE = 0.12
_MAX_SHARE = 0.03


def choose_mode(rng: Random, split: Split, thinking_share: float) -> tuple[bool, Effort]:
    """Return (thinking, effort).

    Held-out exercises are asked at effort low. Training sees the effort texts of the protocol
    too, since a client that names no effort gets one of them.
    """
    thinking = rng.random() < thinking_share
    if not thinking or split == "held_out":
        return thinking, "low"
    share = rng.random()
    if share < _MAX_SHARE:
        return True, "max"
    return True, "high" if share < _MAX_SHARE + _HIGH_SHARE else "low"
