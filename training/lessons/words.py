"""The words that the lessons are made of: few and short, so that each can be one token."""

from __future__ import annotations

ADJECTIVES = (
    "red",
    "blue",
    "green",
    "white",
    "black",
    "gold",
    "old",
    "new",
    "big",
    "small",
    "cold",
    "warm",
    "dry",
    "soft",
    "dark",
    "quick",
)
COLOURS = ADJECTIVES[:6]
ANIMALS = (
    "fox",
    "cat",
    "dog",
    "owl",
    "bear",
    "wolf",
    "deer",
    "crow",
    "duck",
    "frog",
    "goat",
    "lamb",
    "lion",
    "mole",
    "newt",
    "pony",
    "seal",
    "swan",
    "toad",
    "crab",
    "moth",
    "hen",
)
NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dora",
    "Emil",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jana",
    "Kurt",
    "Lena",
    "Mira",
    "Nils",
    "Olga",
    "Paul",
    "Rosa",
    "Sven",
    "Tara",
    "Vera",
)
TOWNS = (
    "Tolan",
    "Vask",
    "Merin",
    "Orvo",
    "Pelda",
    "Quint",
    "Rusk",
    "Salda",
    "Tarn",
    "Ulmo",
    "Wend",
    "Brin",
    "Corda",
    "Delf",
)
JOBS = ("baker", "cook", "farmer", "sailor", "singer", "miller", "doctor", "teacher", "painter", "guard")
THINGS = (
    "boat",
    "hat",
    "lamp",
    "book",
    "drum",
    "cup",
    "map",
    "bell",
    "coat",
    "ring",
    "rope",
    "bag",
    "box",
    "cart",
    "kite",
)
FOODS = ("bread", "soup", "rice", "fish", "cake", "milk", "tea", "corn", "nuts", "honey")
PLACES = ("mill", "river", "hill", "bridge", "market", "garden", "forest", "port", "road", "field", "lake", "tower")
TIMES = ("morning", "evening", "night", "winter", "summer")
SKIES = ("sunny", "cloudy", "windy", "rainy", "foggy")
ROOMS = ("kitchen", "hall", "garden", "tower")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
ALL_PLAIN = ADJECTIVES + ANIMALS + THINGS + FOODS + PLACES
ALL_WORDS = ALL_PLAIN + NAMES + TOWNS + JOBS + TIMES + SKIES + ROOMS
