"""Builds the suites that ship with the model: `python -m halocline.training.suites`.

Every exercise belongs to the held-out part of its lesson. `graded` is the full measure, `check`
and `quick` are parts of it for continuous integration and for a first look. `text` is plain text
for perplexity and for the acceptance of drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from halocline.training.data import Encoder
from halocline.training.item import Item
from halocline.training.lessons.lookup import make_lookup_at
from halocline.training.lessons.prose import make_text
from halocline.training.lessons.registry import LESSONS
from halocline.training.render import conversation, render_item

__all__ = ["SUITE_SEED", "build_suites", "main", "make_exercise"]

Line = dict[str, Any]

SUITE_SEED = 5
_NUM_TEXTS = 24

# Exercises of each group in the suites graded, check and quick. Look-ups are named by distance.
_GROUPS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "sums": (60, 10, 4),
        "copying": (48, 9, 4),
        "facts": (48, 9, 3),
        "chat": (48, 9, 4),
        "tools": (64, 9, 4),
        "lookup-200": (8, 2, 1),
        "lookup-400": (8, 2, 1),
        "lookup-800": (8, 2, 1),
        "lookup-1200": (8, 2, 1),
        "lookup-2000": (8, 2, 1),
        "lookup-3000": (6, 2, 0),
        "lookup-4500": (6, 1, 0),
        "lookup-6000": (6, 1, 0),
    }
)
_SUITES = ("graded", "check", "quick")


def make_exercise(group: str, index: int, *, seed: int) -> Item:
    """Return one held-out exercise of a group: a lesson, or "lookup-" and a distance."""
    lesson, _, distance = group.partition("-")
    if distance:
        return make_lookup_at(seed, index, "held_out", distance=int(distance))
    return LESSONS[lesson](seed, index, "held_out")


def _distinct(group: str, count: int) -> Iterator[Item]:
    """Yield `count` items of a group, each asked only once."""
    seen: set[str] = set()
    index = 0
    while len(seen) < count:
        item = make_exercise(group, index, seed=SUITE_SEED)
        prompt = render_item(item).prompt
        if prompt not in seen:
            seen.add(prompt)
            yield item
        index += 1


def _line(encoder: Encoder, name: str, item: Item) -> Line:
    prompt_ids = encoder.recipe.encode(conversation(item, with_reply=False))
    return {
        "name": name,
        "lesson": item.lesson,
        "kind": item.kind,
        "thinking": item.thinking,
        "messages": list(item.messages),
        "tools": list(item.tools),
        "expected": item.expected(),
        "target": render_item(item).target,
        "prompt_tokens": len(prompt_ids),
    }


def _write(path: Path, lines: Sequence[Line]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def build_suites(folder: Path) -> None:
    """Write all suites for the model in `folder`, whose tokenizer counts the tokens."""
    encoder = Encoder(folder)
    suites: dict[str, list[Line]] = {suite: [] for suite in _SUITES}
    for group, counts in _GROUPS.items():
        lines = [_line(encoder, f"{group}-{i}", item) for i, item in enumerate(_distinct(group, counts[0]))]
        for suite, count in zip(_SUITES, counts, strict=True):
            suites[suite] += lines[:count]
    out = folder / "suites"
    out.mkdir(exist_ok=True)
    for suite, lines in suites.items():
        _write(out / f"{suite}.jsonl", lines)
    texts = [{"name": f"text-{i}", "text": make_text(SUITE_SEED, i, "held_out")} for i in range(_NUM_TEXTS)]
    _write(out / "text.jsonl", texts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of the model")
    build_suites(parser.parse_args(arguments).model)


if __name__ == "__main__":
    main()
