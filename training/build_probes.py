"""Builds a file of probes: `python -m halocline.training.build_probes --help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halocline.training.data import Encoder
from halocline.training.probe import Probe, write_probes
from halocline.training.render import conversation, encode_item
from halocline.training.suites import SUITE_SEED, make_exercise

__all__ = ["main", "make_probe"]

_EOS = 1
_BLOCK = 128
_GROUPS = (
    "sums",
    "copying",
    "facts",
    "chat",
    "tools",
    "mixed",
    "lookup-200",
    "lookup-800",
    "lookup-2000",
    "lookup-6000",
)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("graded"), help="folder of tokenizer.json")
    parser.add_argument("--groups", nargs="+", default=_GROUPS, help="lessons, or lookup- and a distance")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=SUITE_SEED + 1)
    chosen = parser.parse_args(arguments)
    if chosen.seed == SUITE_SEED:
        parser.error(f"seed {SUITE_SEED} makes the released suites; probes need another")
    encoder = Encoder(chosen.tokenizer)
    probes = [make_probe(encoder, group, count=chosen.count, seed=chosen.seed) for group in chosen.groups]
    write_probes(chosen.out, probes)


if __name__ == "__main__":
    main()
