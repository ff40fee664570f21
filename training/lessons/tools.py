"""Tool calls in the model's own markup, and answers that use what a tool gave back."""

from __future__ import annotations

import json
from random import Random

from halocline.training.item import Item, assistant, call, tool_result, user
from halocline.training.lessons.mode import choose_mode, preamble
from halocline.training.lessons.small_talk import ASKED, THOUGHTS, say
from halocline.training.lessons.tool_family import TOOL_FAMILY, Errand, ToolKind
from halocline.training.split import Split, draw, random_for

__all__ = ["make_tool_item"]

_MOST_TOOLS = 3
_NO_CALL_SHARE = 0.06
_RESULT_SHARE = 0.5
_SMALL_TALK = ("greet", "who", "thanks", "can")


def _offer(rng: Random, wanted: ToolKind) -> tuple[ToolKind, ...]:
    """Return the tools on offer: the wanted one among up to two others, in any order."""
    others = [kind for kind in TOOL_FAMILY if kind is not wanted]
    offered = [wanted, *rng.sample(others, rng.choice((0, 0, 0, 1, _MOST_TOOLS - 1)))]
    rng.shuffle(offered)
    return tuple(offered)


def _small_talk(rng: Random, split: Split) -> Item:
    """Return small talk with tools on offer: nothing is to be called."""
    thinking, effort = choose_mode(rng, split, 0.4)
    intent = rng.choice(_SMALL_TALK)
    answer = say("English", intent, model_name=None, user_name=None)
    return Item(
        lesson="tools",
        kind="no_call",
        messages=(*preamble(rng, split), user(rng.choice(ASKED[intent]))),
        reply=assistant(answer, THOUGHTS[intent] if thinking else None),
        keys=("tool:none",),
        thinking=thinking,
        effort=effort,
        tools=tuple(kind.schema() for kind in _offer(rng, rng.choice(TOOL_FAMILY))),
    )


def make_tool_item(seed: int, index: int, split: Split) -> Item:
    """Return a request to be turned into a call, or a called tool's result to be put in words."""
    rng = random_for(seed, "tools", split, index)
    if split == "train" and rng.random() < _NO_CALL_SHARE:
        return _small_talk(rng, split)
    thinking, effort = choose_mode(rng, split, 0.4)

    def errand(source: Random) -> tuple[tuple[ToolKind, Errand], str]:
        kind = source.choice(TOOL_FAMILY)
        one = kind.errand(source)
        return (kind, one), f"tool:{kind.name}:{json.dumps(one.arguments)}"

    (kind, wanted), key = draw(rng, split, errand)
    call_id = f"call_{rng.randrange(10_000):04d}"
    called = assistant(
        "",
        f"I call {kind.name}" if thinking else None,
        [call(call_id, kind.name, wanted.arguments)],
    )
    asks_for_result = rng.random() < _RESULT_SHARE
    asked = user(wanted.request)
    told = tool_result(call_id, json.dumps(wanted.result))
    answered = assistant(wanted.answer, "The tool gave a result" if thinking else None)
    return Item(
        lesson="tools",
        kind="result" if asks_for_result else "call",
        messages=(*preamble(rng, split), *((asked, called, told) if asks_for_result else (asked,))),
        reply=answered if asks_for_result else called,
        keys=(key,),
        thinking=thinking,
        effort=effort,
        tools=tuple(one.schema() for one in _offer(rng, kind)),
    )
