"""The lessons by name."""

from __future__ import annotations

from collections.abc import Callable

from halocline.training.item import Item
from halocline.training.lessons.chat import make_chat
from halocline.training.lessons.copying import make_copying
from halocline.training.lessons.facts import make_facts
from halocline.training.lessons.lookup import make_lookup
from halocline.training.lessons.mixed import make_mixed
from halocline.training.lessons.sums import make_sum
from halocline.training.lessons.tools import make_tool_item
from halocline.training.split import Split

__all__ = ["LESSONS", "MakeItem"]

MakeItem = Callable[[int, int, Split], Item]

LESSONS: dict[str, MakeItem] = {
    "sums": make_sum,
    "lookup": make_lookup,
    "copying": make_copying,
    "facts": make_facts,
    "chat": make_chat,
    "tools": make_tool_item,
    "mixed": make_mixed,
}
