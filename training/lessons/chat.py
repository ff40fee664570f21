"""Small talk: greetings, names, and system texts that set a name, a language or a last word.

Whoever types a greeting gets an honest answer, and whoever asks for more than this model can do
is told so. Exercises that name nothing variable are fixed phrases; those are for training only.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from halocline.training.item import Item, Message, assistant, system, user
from halocline.training.lessons.mode import choose_mode, preamble
from halocline.training.lessons.small_talk import ASKED, LANGUAGES, THOUGHTS, UNKNOWN, say
from halocline.training.lessons.words import ANIMALS, NAMES, PLACES, THINGS
from halocline.training.split import Split, draw, random_for

__all__ = ["make_chat"]

_MODEL_NAMES = ("Nira", "Sal", "Kelp", "Brine", "Reef", "Tide")
_LAST_WORDS = ANIMALS + PLACES + THINGS
_PLAIN_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What the system text sets, and who the user is."""

    model_name: str | None
    last_word: str | None
    language: str
    user_name: str | None

    @property
    def is_plain(self) -> bool:
        return not (self.model_name or self.last_word or self.user_name)

    def system_text(self) -> str:
        lines = []
        if self.model_name:
            lines.append(f"Your name is {self.model_name}.")
        if self.language != "English":
            lines.append(f"Answer in {self.language}.")
        if self.last_word:
            lines.append(f"End each answer with the word {self.last_word}.")
        return " ".join(lines)

    def answer(self, intent: str) -> str:
        text = say(self.language, intent, model_name=self.model_name, user_name=self.user_name)
        return f"{text} {self.last_word}" if self.last_word else text


def _plain_setting(rng: Random) -> _Setting:
    language = rng.choice(LANGUAGES) if rng.random() < 0.15 else "English"
    return _Setting(model_name=None, last_word=None, language=language, user_name=None)


def _setting(rng: Random) -> _Setting:
    while True:
        setting = _Setting(
            model_name=rng.choice(_MODEL_NAMES) if rng.random() < 0.5 else None,
            last_word=rng.choice(_LAST_WORDS) if rng.random() < 0.5 else None,
            language=rng.choice(LANGUAGES) if rng.random() < 0.3 else "English",
            user_name=rng.choice(NAMES) if rng.random() < 0.5 else None,
        )
        if not setting.is_plain:
            return setting


def _written(rng: Random, phrase: str) -> str:
    """Return the phrase as people type it: sometimes in lower case, sometimes without its end."""
    if rng.random() < 0.3:
        phrase = phrase.lower()
    return phrase.rstrip(".!?") if rng.random() < 0.25 else phrase


def _question(rng: Random, intent: str) -> str:
    if intent == "unknown":
        return rng.choice(UNKNOWN)(rng)
    return rng.choice(ASKED[intent])


def _intents(rng: Random, setting: _Setting) -> list[str]:
    """Return what is said turn by turn; a user with a name introduces themselves first."""
    rest = ["who", "thanks", "bye", "how", "can", "human", "unknown", "unknown"]
    if setting.user_name:
        return ["introduce", *rng.sample([*rest, "my_name", "my_name", "my_name"], rng.randint(0, 3))]
    return [rng.choice(["greet", "who", *rest]), *rng.sample(rest, rng.randint(0, 2))]


def make_chat(seed: int, index: int, split: Split) -> Item:
    """Return a short conversation whose last answer is asked for."""
    rng = random_for(seed, "chat", split, index)
    thinking, effort = choose_mode(rng, split, 0.4)

    def conversation(source: Random) -> tuple[tuple[_Setting, list[str], list[str]], str]:
        setting = _setting(source)
        intents = _intents(source, setting)
        questions = [_question(source, intent) for intent in intents]
        return (setting, intents, questions), f"chat:{setting}:{'|'.join(intents)}:{'|'.join(questions)}"

    if split == "train" and rng.random() < _PLAIN_SHARE:
        setting = _plain_setting(rng)
        intents = _intents(rng, setting)
        questions, key = [_question(rng, intent) for intent in intents], "chat:plain"
    else:
        (setting, intents, questions), key = draw(rng, split, conversation)
    messages: list[Message] = [system(setting.system_text())] if setting.system_text() else []
    for intent, question in zip(intents, questions, strict=True):
        phrase = question.format(user=setting.user_name)
        written = phrase if intent == "introduce" or split == "held_out" else _written(rng, phrase)
        messages += [user(written), assistant(setting.answer(intent))]
    return Item(
        lesson="chat",
        kind="plain" if setting.is_plain else "setting",
        messages=(*preamble(rng, split), *messages[:-1]),
        reply=assistant(messages[-1]["content"], THOUGHTS[intents[-1]] if thinking else None),
        keys=(key,),
        thinking=thinking,
        effort=effort,
    )
