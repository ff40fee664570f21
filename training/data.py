"""Makes rows of training tokens: exercises end to end, each row a pure function of its number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import deepseek_recipe as recipe
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from halocline.training.lessons.lookup import make_lookup_of
from halocline.training.lessons.prose import make_text
from halocline.training.lessons.registry import LESSONS
from halocline.training.render import encode_item
from halocline.training.rows import KIND_PROMPT, KIND_REPLY, KIND_TEXT, Row, pack
from halocline.training.split import Split, random_for
from halocline.training.stages import Stage
from halocline.training.tokenizer import CONTROL_TOKENS

__all__ = ["Encoder", "make_rows", "token_kinds"]

_BOS, _EOS = 0, 1
_ASSISTANT = CONTROL_TOKENS.index("<｜Assistant｜>")
_MAX_ITEMS_PER_ROW = 1024
_MAX_REFUSALS = 6
_SMALLEST_TEXT = 16


class Encoder:
    """The tokenizer of a folder, as the recipe uses it for prompts and as plain text needs it."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        self.recipe = recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_str(text))
        self.tokenizer = Tokenizer.from_str(text)


def token_kinds(ids: Sequence[int]) -> NDArray[np.uint16]:
    """Mark the tokens that a model has to produce.

    A reply begins after the assistant's control token and the think token that belongs to the prompt, and ends
    with the end token, which it includes. Earlier replies of the same conversation count too.
    """
    array = np.asarray(ids)
    kinds = np.zeros(len(array), dtype=np.uint16)
    ends = np.flatnonzero(array == _EOS)
    for start in np.flatnonzero(array == _ASSISTANT):
        end = ends[np.searchsorted(ends, start)]
        kinds[start + 2 : end + 1] = KIND_REPLY
    return kinds


def _text_row(encoder: Encoder, seed: int, index: int, split: Split, limit: int) -> Row:
    text = make_text(seed, index, split)
    ids = [_BOS, *encoder.tokenizer.encode(text, add_special_tokens=False).ids, _EOS][:limit]
    kinds = np.full(len(ids), KIND_TEXT, dtype=np.uint16)
    kinds[0] = KIND_PROMPT
    return pack(ids, kinds)


def _long_lookup(encoder: Encoder, stage: Stage, rng: Random, split: Split) -> Row:
    item = make_lookup_of(rng, split, rng.randint(*stage.long_lookup))
    ids = encode_item(encoder.recipe, item, _EOS)
    return pack(ids, token_kinds(ids))


def _row(encoder: Encoder, stage: Stage, seed: int, number: int, split: Split) -> Row:
    """Fill one row of length + 1 tokens; no exercise is ever cut, only plain text at the end."""
    rng = random_for(seed, f"row-{stage.name}", split, number)
    names, weights = zip(*stage.mixture, strict=True)
    parts: list[Row] = []
    room, refusals = stage.length + 1, 0
    if rng.random() < stage.long_lookup_share:
        first = _long_lookup(encoder, stage, rng, split)
        if len(first) <= room:
            parts.append(first)
            room -= len(first)
    for slot in range(_MAX_ITEMS_PER_ROW):
        if room < _SMALLEST_TEXT or refusals > _MAX_REFUSALS:
            break
        index = number * _MAX_ITEMS_PER_ROW + slot
        name = rng.choices(names, weights)[0]
        if name == "text":
            part = _text_row(encoder, seed, index, split, room)
        else:
            ids = encode_item(encoder.recipe, LESSONS[name](seed, index, split), _EOS)
            part = pack(ids, token_kinds(ids))
        if len(part) > room:
            refusals += 1
            continue
        parts.append(part)
        room -= len(part)
    if room >= _SMALLEST_TEXT:
        parts.append(_text_row(encoder, seed, (number + 1) * _MAX_ITEMS_PER_ROW - 1, split, room))
        room -= len(parts[-1])
    parts.append(np.full(room, _EOS, dtype=np.uint16))
    return np.concatenate(parts)


def make_rows(
    encoder: Encoder, stage: Stage, *, seed: int, start: int, count: int, split: Split = "train"
) -> NDArray[np.uint16]:
    """Return rows `start` to `start + count` of a stage.

    Returns:
        (count, length + 1) packed tokens; row i is the same whatever it is asked for with.
    """
    rows = np.empty((count, stage.length + 1), dtype=np.uint16)
    for i in range(count):
        rows[i] = _row(encoder, stage, seed, start + i, split)
    return rows
