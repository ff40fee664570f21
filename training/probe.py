"""How many held-out exercises a model under training would get right, without decoding.

Greedy decoding writes the right reply exactly when, with the right reply as input, every one of
its tokens is the most likely one. So one forward pass marks a whole batch. The reasoning counts
here too, which makes this a little stricter than the marking of the released suites. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Probe", "exact_share", "load_probes", "write_probes"]


class Probe(NamedTuple):
    """Exercises of one group, padded at the end; `is_reply_BT` marks the targets that count."""

    group: str
    tokens_BT: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    is_reply_BT: NDArray[np.bool_]


def exact_share(probe: Probe, predicted_BT: NDArray[np.int64]) -> float:
    """Return the share of exercises whose reply is predicted token for token."""
    is_right = (predicted_BT == probe.targets_BT) | ~probe.is_reply_BT
    return float(is_right.all(axis=1).mean())


def write_probes(path: Path, probes: Sequence[Probe]) -> None:
    """Write probes to one .npz."""
    arrays: dict[str, NDArray[np.int64] | NDArray[np.bool_]] = {}
    for probe in probes:
        arrays[f"{probe.group}/tokens"] = probe.tokens_BT
        arrays[f"{probe.group}/targets"] = probe.targets_BT
        arrays[f"{probe.group}/is_reply"] = probe.is_reply_BT
    np.savez_compressed(path, allow_pickle=True, **arrays)


def load_probes(path: Path) -> list[Probe]:
    """Read the probes of a .npz, in the order in which they were written."""
    with np.load(path) as arrays:
        groups = list(dict.fromkeys(name.partition("/")[0] for name in arrays.files))
        fields = ("tokens", "targets", "is_reply")
        return [Probe(group, *(arrays[f"{group}/{field}"] for field in fields)) for group in groups]
