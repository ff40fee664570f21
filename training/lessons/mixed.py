"""Conversations that go from one lesson to another, as people's do."""

from __future__ import annotations

from random import Random

from halocline.training.item import Item, Message
from halocline.training.lessons.chat import make_chat
from halocline.training.lessons.copying import make_copying
from halocline.training.lessons.facts import make_facts
from halocline.training.lessons.sums import make_sum
from halocline.training.split import Split, random_for

__all__ = ["make_mixed"]

_PARTS = (make_sum, make_copying, make_facts, make_chat)
_MOST_PARTS = 3


def _without_system(rng: Random, index: int, split: Split) -> list[Item]:
    """Return one exercise each of a few lessons; none of them needs its own system text."""
    makers = rng.sample(_PARTS, rng.randint(2, _MOST_PARTS))
    items = []
    for make in makers:
        item = make(rng.getrandbits(32), index, split)
        while item.messages[0]["role"] == "system":
            item = make(rng.getrandbits(32), index, split)
        items.append(item)
    return items


def make_mixed(seed: int, index: int, split: Split) -> Item:
    """Return exercises of several lessons one after the other; the last one is the question."""
    rng = random_for(seed, "mixed", split, index)
    items = _without_system(rng, index, split)
    messages: list[Message] = []
    for item in items[:-1]:
        messages += [*item.messages, item.reply]
    last = items[-1]
    return Item(
        lesson="mixed",
        kind=last.lesson,
        messages=(*messages, *last.messages),
        reply=last.reply,
        keys=tuple(key for item in items for key in item.keys),
        thinking=last.thinking,
        effort=last.effort,
    )
