"""How many held-out exercises a model under training would get right, without decoding.

Greedy decoding writes the right reply exactly when, with the right reply as input, every one of
its tokens is the most likely one. So one forward pass marks a whole batch. The reasoning counts
here too, which makes this a little stricter than the marking of the released suites.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halocline.training.data import Encoder
from halocline.training.render import conversation, encode_item
from halocline.training.suites import make_exercise

__all__ = ["Probe", "exact_share", "make_probe"]

_EOS = 1
_BLOCK = 128


class Probe(NamedTuple):
    """Exercises of one group, padded at the end; `is_reply_BT` marks the targets that count."""

    group: str
    tokens_BT: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    is_reply_BT: NDArray[np.bool_]


def make_probe(encoder: Encoder, group: str, *, count: int, seed: int) -> Probe:
    """Return `count` held-out exercises.

    Args:
        encoder: The tokenizer.
        group: A lesson, or "lookup-2000" for look-ups at that distance.
        count: How many.
        seed: Not the one of the released suites, so that these stay unseen until the end.
    """
    rows, starts = [], []
    for index in range(count):
        item = make_exercise(group, index, seed=seed)
        rows.append(encode_item(encoder.recipe, item, _EOS))
        starts.append(len(encoder.recipe.encode(conversation(item, with_reply=False))))
    length = -(-max(map(len, rows)) // _BLOCK) * _BLOCK
    padded = np.full((count, length + 1), _EOS, dtype=np.int64)
    is_reply = np.zeros((count, length), dtype=np.bool_)
    for i, (ids, start) in enumerate(zip(rows, starts, strict=True)):
        padded[i, : len(ids)] = ids
        is_reply[i, start - 1 : len(ids) - 1] = True
    return Probe(group, padded[:, :-1], padded[:, 1:], is_reply)


def exact_share(probe: Probe, predicted_BT: NDArray[np.int64]) -> float:
    """Return the share of exercises whose reply is predicted token for token."""
    is_right = (predicted_BT == probe.targets_BT) | ~probe.is_reply_BT
    return float(is_right.all(axis=1).mean())
