"""Files of training rows, and the batches that a step takes from them. Needs numpy alone.

A row is stored as uint16. The low ten bits are the token; the two above say what the token is to
the loss, so a file of rows needs no second file of masks.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["KIND_PROMPT", "KIND_REPLY", "KIND_TEXT", "Batch", "Row", "batch_at", "load_rows", "pack", "write_rows"]

Row = NDArray[np.uint16]

KIND_PROMPT, KIND_REPLY, KIND_TEXT = 0, 1, 2
_KIND_SHIFT = 10
_TOKEN_MASK = (1 << _KIND_SHIFT) - 1


class Batch(NamedTuple):
    """One step's input: `targets` is `tokens` one place on, `kinds` is what each target is."""

    tokens_BT: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    kinds_BT: NDArray[np.uint8]


def pack(ids: Sequence[int], kinds: NDArray[np.uint16]) -> Row:
    """Return tokens and their kinds as one row."""
    return (np.asarray(ids, dtype=np.uint16) | (kinds << _KIND_SHIFT)).astype(np.uint16)


def write_rows(path: Path, rows: NDArray[np.uint16]) -> None:
    """Write rows as .npy, or as .npy.xz at about a fifth of the size."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "wb") as file:
        np.save(file, rows)


def load_rows(path: Path) -> NDArray[np.uint16]:
    """Read a file of rows; a .npy is mapped, a .npy.xz is unpacked in memory."""
    if path.suffix == ".xz":
        with lzma.open(path, "rb") as file:
            rows: NDArray[np.uint16] = np.load(io.BytesIO(file.read()))
            return rows
    mapped: NDArray[np.uint16] = np.load(path, mmap_mode="r")
    return mapped


def batch_at(rows: NDArray[np.uint16], *, seed: int, step: int, batch: int) -> Batch:
    """Return the batch of one step: every epoch takes all rows once, in an order of its own."""
    num_rows = len(rows)
    places = np.arange(step * batch, (step + 1) * batch)
    epochs = places // num_rows
    chosen = np.empty(batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        order = np.random.default_rng((seed, int(epoch))).permutation(num_rows)
        chosen[epochs == epoch] = order[places[epochs == epoch] % num_rows]
    packed = np.asarray(rows[chosen])
    tokens = (packed & _TOKEN_MASK).astype(np.int64)
    kinds = (packed[:, 1:] >> _KIND_SHIFT).astype(np.uint8)
    return Batch(tokens[:, :-1], tokens[:, 1:], kinds)
