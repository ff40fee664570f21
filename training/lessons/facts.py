"""Short facts about a made-up world, told in plain sentences and then asked for."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from halocline.training.item import Item, Message, assistant, user
from halocline.training.lessons.mode import choose_mode, preamble
from halocline.training.lessons.words import COLOURS, FOODS, JOBS, NAMES, THINGS, TOWNS
from halocline.training.split import Split, draw, random_for

__all__ = ["make_facts"]

_RELATIONS = ("town", "job", "thing", "food", "friend")
_MAX_TURNS = 4


class _Fact(NamedTuple):
    name: str
    relation: str
    value: str

    def told(self) -> str:
        """Return the sentence that states this fact; it is the answer too."""
        return {
            "town": f"{self.name} lives in {self.value}.",
            "job": f"{self.name} is a {self.value}.",
            "thing": f"{self.name} has a {self.value}.",
            "food": f"{self.name} likes {self.value}.",
            "friend": f"The friend of {self.name} is {self.value}.",
        }[self.relation]

    def question(self) -> str:
        return {
            "town": f"Where does {self.name} live?",
            "job": f"What is the job of {self.name}?",
            "thing": f"What does {self.name} have?",
            "food": f"What does {self.name} like?",
            "friend": f"Who is the friend of {self.name}?",
        }[self.relation]

    def backward_question(self) -> str | None:
        """Return the question for the name, where one is asked for in this world."""
        return {
            "town": f"Who lives in {self.value}?",
            "thing": f"Who has a {self.value}?",
            "food": f"Who likes {self.value}?",
        }.get(self.relation)


def _new_fact(rng: Random, split: Split) -> tuple[_Fact, str]:
    def make(source: Random) -> tuple[_Fact, str]:
        relation = source.choice(_RELATIONS)
        name, other = source.sample(NAMES, 2)
        value = {
            "town": source.choice(TOWNS),
            "job": source.choice(JOBS),
            "thing": f"{source.choice(COLOURS)} {source.choice(THINGS)}",
            "food": source.choice(FOODS),
            "friend": other,
        }[relation]
        return _Fact(name, relation, value), f"fact:{relation}:{name}:{value}"

    return draw(rng, split, make)


def _world(rng: Random, split: Split, num_facts: int) -> tuple[list[_Fact], list[str]]:
    """Return facts that never contradict each other: one value a name, one name a value."""
    facts: list[_Fact] = []
    keys: list[str] = []
    taken: set[tuple[str, str]] = set()
    while len(facts) < num_facts:
        fact, key = _new_fact(rng, split)
        sides = {(fact.relation, fact.name), (fact.relation, f"value:{fact.value}")}
        if (fact.relation != "job" and taken & sides) or (fact.relation, fact.name) in taken:
            continue
        taken |= sides
        facts.append(fact)
        keys.append(key)
    return facts, keys


def _ask(rng: Random, fact: _Fact, facts: list[_Fact]) -> tuple[str, str]:
    """Return one question about this fact and its answer."""
    style = rng.random()
    backward = fact.backward_question()
    if style < 0.25 and backward:
        return backward, fact.told()
    if style < 0.45 and fact.relation == "town":
        others = [other.value for other in facts if other.relation == "town"]
        guess = rng.choice([fact.value, rng.choice(others), rng.choice(TOWNS)])
        answer = "Yes." if guess == fact.value else f"No. {fact.told()}"
        return f"Does {fact.name} live in {guess}?", answer
    return fact.question(), fact.told()


def make_facts(seed: int, index: int, split: Split) -> Item:
    """Return a told world and one question; training goes on asking for a few turns."""
    rng = random_for(seed, "facts", split, index)
    thinking, effort = choose_mode(rng, split, 0.25)
    facts, keys = _world(rng, split, rng.randint(2, 9))
    num_turns = rng.randint(1, min(_MAX_TURNS, len(facts))) if split == "train" else 1
    asked = rng.sample(facts, num_turns)
    messages: list[Message] = []
    told = " ".join(fact.told() for fact in facts)
    for turn, fact in enumerate(asked):
        question, answer = _ask(rng, fact, facts)
        messages.append(user(f"{told} {question}" if turn == 0 else question))
        messages.append(assistant(answer))
    last = asked[-1]
    reply = assistant(messages[-1]["content"], f"I read: {last.told()}" if thinking else None)
    return Item(
        lesson="facts",
        kind="world",
        messages=(*preamble(rng, split), *messages[:-1]),
        reply=reply,
        keys=tuple(keys),
        thinking=thinking,
        effort=effort,
    )
