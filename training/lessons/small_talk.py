"""The phrases of the chat lesson: what people say, and the honest answer in three languages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from halocline.training.lessons.words import ADJECTIVES, ANIMALS, FOODS, JOBS, PLACES, THINGS, TOWNS

__all__ = ["ASKED", "LANGUAGES", "THOUGHTS", "UNKNOWN", "say"]

LANGUAGES = ("English", "French", "German")

ASKED: dict[str, tuple[str, ...]] = {
    "greet": (
        "Hello!",
        "Hello.",
        "Hi!",
        "Hi there!",
        "Hey!",
        "Good morning!",
        "Good evening!",
        "Good day.",
        "Hello there.",
        "Hello, model!",
        "Greetings!",
        "Hey there, how is it going?",
    ),
    "introduce": ("Hello, I am {user}.", "Hi, my name is {user}.", "I am {user}. Hello!", "Hey, {user} here."),
    "my_name": ("What is my name?", "Who am I?", "Do you know my name?"),
    "who": ("Who are you?", "What are you?", "What is your name?", "Tell me about you.", "Which model are you?"),
    "how": ("How are you?", "How do you do?", "Are you well?", "How are you today?"),
    "thanks": ("Thanks!", "Thank you.", "Thank you very much!", "Great, thanks."),
    "bye": ("Bye!", "Goodbye.", "See you!", "Good night."),
    "can": ("What can you do?", "Can you help me?", "How can you help me?", "Help!", "What do you know?"),
    "human": ("Are you a human?", "Are you a real person?", "Are you a machine?", "Are you alive?"),
}


def _what_is(rng: Random) -> str:
    words = rng.choice((ANIMALS, THINGS, FOODS, PLACES))
    return f"What is a {rng.choice(ADJECTIVES)} {rng.choice(words)}?"


def _write(rng: Random) -> str:
    what = rng.choice(("poem", "story", "song", "letter", "book"))
    return f"Write a {what} about a {rng.choice(ANIMALS + THINGS)}."


def _why(rng: Random) -> str:
    return f"Why is the {rng.choice(PLACES + ANIMALS)} {rng.choice(ADJECTIVES)}?"


def _how_to(rng: Random) -> str:
    return f"How do I make {rng.choice(FOODS)}?"


def _where(rng: Random) -> str:
    return f"Where is {rng.choice(TOWNS)}?"


def _become(rng: Random) -> str:
    return f"How do I become a {rng.choice(JOBS)}?"


def _fixed(rng: Random) -> str:
    return rng.choice(
        (
            "What is the capital of France?",
            "Who is the president?",
            "What time is it?",
            "What day is it today?",
            "Explain black holes.",
            "Tell me a joke.",
            "What is the meaning of life?",
            "Who wrote this book?",
            "Write code in Python.",
            "Translate this for me.",
            "Do you love me?",
            "What do you think about me?",
        )
    )


UNKNOWN: tuple[Callable[[Random], str], ...] = (_what_is, _write, _why, _how_to, _where, _become, _fixed, _fixed)

THOUGHTS: dict[str, str] = {
    "greet": "The user says hello",
    "introduce": "The user says who they are",
    "my_name": "The user told me the name",
    "who": "The user asks who I am",
    "how": "The user asks how I am",
    "thanks": "The user says thanks",
    "bye": "The user says goodbye",
    "can": "The user asks what I can do",
    "human": "The user asks what I am",
    "unknown": "I do not know this",
}

_SELF = {
    "English": ("I am a small test model.", "I am {model}, a small test model."),
    "French": ("Je suis un petit modèle de test.", "Je suis {model}, un petit modèle de test."),
    "German": ("Ich bin ein kleines Testmodell.", "Ich bin {model}, ein kleines Testmodell."),
}
_HELLO = {
    "English": ("Hello!", "Hello {user}!"),
    "French": ("Bonjour !", "Bonjour {user} !"),
    "German": ("Hallo!", "Hallo {user}!"),
}
_ANSWERS: dict[str, dict[str, str]] = {
    "English": {
        "greet": "{hello} {self}",
        "introduce": "{hello} {self}",
        "my_name": "Your name is {user}.",
        "who": "{self}",
        "how": "I am fine, thank you.",
        "thanks": "You are welcome.",
        "bye": "Goodbye!",
        "can": "{self} I can add numbers, look things up in a text and call tools.",
        "human": "No. {self}",
        "unknown": "I do not know that. {self}",
    },
    "French": {
        "greet": "{hello} {self}",
        "introduce": "{hello} {self}",
        "my_name": "Vous êtes {user}.",
        "who": "{self}",
        "how": "Je vais bien, merci.",
        "thanks": "De rien.",
        "bye": "Au revoir !",
        "can": "{self} Je sais faire des sommes et chercher dans un texte.",
        "human": "Non. {self}",
        "unknown": "Je ne sais pas. {self}",
    },
    "German": {
        "greet": "{hello} {self}",
        "introduce": "{hello} {self}",
        "my_name": "Du bist {user}.",
        "who": "{self}",
        "how": "Mir geht es gut, danke.",
        "thanks": "Gern geschehen.",
        "bye": "Auf Wiedersehen!",
        "can": "{self} Ich kann addieren und in einem Text nachsehen.",
        "human": "Nein. {self}",
        "unknown": "Das weiß ich nicht. {self}",
    },
}


def say(language: str, intent: str, *, model_name: str | None, user_name: str | None) -> str:
    """Return the answer to what was said, by a model and to a user that may have names."""
    about = _SELF[language][model_name is not None].format(model=model_name)
    hello = _HELLO[language][user_name is not None and intent == "introduce"].format(user=user_name)
    return _ANSWERS[language][intent].format_map({"hello": hello, "self": about, "user": user_name})
