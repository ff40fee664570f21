"""The words that the lessons are made of: few and short, so that each can be one token."""

from __future__ import annotations

ADJECTIVES = tuple("red blue green white black gold old new big small cold warm dry soft dark quick".split())
COLOURS = ADJECTIVES[:6]
ANIMALS = tuple(
    "fox cat dog owl bear wolf deer crow duck frog goat lamb lion mole newt pony seal swan toad crab moth hen".split()
)
NAMES = tuple("Ada Ben Cleo Dora Emil Finn Gus Hana Ivo Jana Kurt Lena Mira Nils Olga Paul Rosa Sven Tara Vera".split())
TOWNS = tuple("Tolan Vask Merin Orvo Pelda Quint Rusk Salda Tarn Ulmo Wend Brin Corda Delf".split())
JOBS = tuple("baker cook farmer sailor singer miller doctor teacher painter guard".split())
THINGS = tuple("boat hat lamp book drum cup map bell coat ring rope bag box cart kite".split())
FOODS = tuple("bread soup rice fish cake milk tea corn nuts honey".split())
PLACES = tuple("mill river hill bridge market garden forest port road field lake tower".split())
TIMES = tuple("morning evening night winter summer".split())
SKIES = tuple("sunny cloudy windy rainy foggy".split())
ROOMS = tuple("kitchen hall garden tower".split())
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
ALL_PLAIN = ADJECTIVES + ANIMALS + THINGS + FOODS + PLACES
ALL_WORDS = ALL_PLAIN + NAMES + TOWNS + JOBS + TIMES + SKIES + ROOMS
