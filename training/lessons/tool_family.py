"""The made-up tools: their schemas, how people ask for them, and what they give back.

Between them the arguments cover every JSON type: string, integer, number, boolean, null, array
and object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from halocline.training.item import Tool
from halocline.training.lessons.words import ALL_PLAIN, COLOURS, FOODS, NAMES, PLACES, ROOMS, SKIES, THINGS, TOWNS

__all__ = ["TOOL_FAMILY", "Errand", "ToolKind"]


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What a user wants done: the words, the arguments, the tool's result and the answer to it."""

    request: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str


@dataclass(frozen=True, kw_only=True)
class ToolKind:
    """One tool: its schema and a source of errands."""

    name: str
    description: str
    properties: dict[str, Any]
    errand: Callable[[Random], Errand]

    def schema(self) -> Tool:
        """Return the tool as an OpenAI chat request states it."""
        parameters = {"type": "object", "properties": self.properties, "required": list(self.properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}


def _weather(rng: Random) -> Errand:
    town, days, sky, degrees = rng.choice(TOWNS), rng.randint(2, 9), rng.choice(SKIES), rng.randint(10, 35)
    return Errand(
        request=f"What is the weather in {town} for {days} days?",
        arguments={"town": town, "days": days},
        result={"sky": sky, "degrees": degrees},
        answer=f"It is {sky} in {town}, {degrees} degrees.",
    )


def _alarm(rng: Random) -> Errand:
    hour, minute, repeat = rng.randint(1, 23), rng.randint(10, 59), rng.random() < 0.5
    number = rng.randint(10, 99)
    return Errand(
        request=f"Set an alarm at {hour}:{minute} {'each day' if repeat else 'once'}.",
        arguments={"hour": hour, "minute": minute, "repeat": repeat},
        result={"alarm": number},
        answer=f"Alarm {number} is set at {hour}:{minute}.",
    )


def _note(rng: Random) -> Errand:
    name, urgent, sent = rng.choice(NAMES), rng.random() < 0.5, rng.random() < 0.7
    text = " ".join(rng.choice(ALL_PLAIN) for _ in range(rng.randint(2, 4)))
    return Errand(
        request=f"Send {name} {'an urgent' if urgent else 'a'} note: {text}",
        arguments={"to": name, "text": text, "urgent": urgent},
        result={"sent": sent},
        answer=f"The note to {name} {'is' if sent else 'is not'} sent.",
    )


def _items(rng: Random) -> Errand:
    foods, place = rng.sample(FOODS, rng.randint(2, 4)), rng.choice(PLACES)
    count = rng.randint(10, 99)
    return Errand(
        request=f"Add {', '.join(foods[:-1])} and {foods[-1]} to the {place} list.",
        arguments={"list": place, "items": foods},
        result={"count": count},
        answer=f"The {place} list has {count} items.",
    )


def _move(rng: Random) -> Errand:
    x, y = (rng.choice((-1, 1, 1)) * (rng.randint(0, 9) + rng.randint(1, 9) / 10) for _ in range(2))
    x, y, done = round(x, 1), round(y, 1), rng.random() < 0.7
    return Errand(
        request=f"Move to x {x} and y {y}.",
        arguments={"x": x, "y": y},
        result={"done": done},
        answer=f"I {'am' if done else 'am not'} at x {x} and y {y}.",
    )


def _find(rng: Random) -> Errand:
    colour, thing, place = rng.choice(COLOURS), rng.choice(THINGS), rng.choice(PLACES)
    return Errand(
        request=f"Find the {colour} {thing}.",
        arguments={"filter": {"color": colour, "thing": thing}},
        result={"place": place},
        answer=f"The {colour} {thing} is at the {place}.",
    )


def _light(rng: Random) -> Errand:
    room, level = rng.choice(ROOMS), rng.choice((None, rng.randint(10, 99), rng.randint(10, 99)))
    watts = rng.randint(10, 99)
    return Errand(
        request=f"Reset the light in the {room}." if level is None else f"Set the light in the {room} to {level}.",
        arguments={"room": room, "level": level},
        result={"watts": watts},
        answer=f"The light in the {room} takes {watts} watts.",
    )


def _total(rng: Random) -> Errand:
    numbers = [rng.randint(10, 99) for _ in range(rng.randint(2, 5))]
    total = sum(numbers)
    return Errand(
        request=f"Use the tool to add {json.dumps(numbers)[1:-1]}.",
        arguments={"numbers": numbers},
        result={"total": total},
        answer=f"The total is {total}.",
    )


TOOL_FAMILY: tuple[ToolKind, ...] = (
    ToolKind(
        name="get_weather",
        description="The weather in a town.",
        properties={"town": _STRING, "days": _INTEGER},
        errand=_weather,
    ),
    ToolKind(
        name="set_alarm",
        description="Set an alarm.",
        properties={"hour": _INTEGER, "minute": _INTEGER, "repeat": _BOOLEAN},
        errand=_alarm,
    ),
    ToolKind(
        name="send_note",
        description="Send a note to a person.",
        properties={"to": _STRING, "text": _STRING, "urgent": _BOOLEAN},
        errand=_note,
    ),
    ToolKind(
        name="add_items",
        description="Add items to a list.",
        properties={"list": _STRING, "items": {"type": "array", "items": _STRING}},
        errand=_items,
    ),
    ToolKind(name="move_to", description="Move to a point.", properties={"x": _NUMBER, "y": _NUMBER}, errand=_move),
    ToolKind(
        name="find_thing",
        description="Find a thing.",
        properties={"filter": {"type": "object", "properties": {"color": _STRING, "thing": _STRING}}},
        errand=_find,
    ),
    ToolKind(
        name="set_light",
        description="Set the light in a room.",
        properties={"room": _STRING, "level": {"type": ["integer", "null"]}},
        errand=_light,
    ),
    ToolKind(
        name="get_total",
        description="Add numbers.",
        properties={"numbers": {"type": "array", "items": _INTEGER}},
        errand=_total,
    ),
)
