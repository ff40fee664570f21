"""How an exercise is asked: with or without thinking, and at which effort."""

from __future__ import annotations

from random import Random

from halocline.training.item import Effort, Message, system
from halocline.training.split import Split

__all__ = ["choose_mode", "preamble"]

_PREAMBLES = ("You are a helpful assistant.", "You are a small test model.", "Be brief.", "Be kind and helpful.")
_PREAMBLE_SHARE = 0.08
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


def preamble(rng: Random, split: Split) -> tuple[Message, ...]:
    """Return now and then, in training, a system text that changes nothing, as clients like to send."""
    if split == "held_out" or rng.random() >= _PREAMBLE_SHARE:
        return ()
    return (system(rng.choice(_PREAMBLES)),)
