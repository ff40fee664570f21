"""The released tokenizer: lossless, frugal with the protocol's texts, and safe with a user's."""

from __future__ import annotations

import json
from pathlib import Path

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from halocline.training.data import Encoder
from halocline.training.lessons.tool_family import TOOL_FAMILY
from halocline.training.lessons.words import ALL_WORDS
from halocline.training.tokenizer import CONTROL_TOKENS, VOCAB_SIZE, protocol_pieces, write_tokenizer

GRADED = Path(__file__).parents[2] / "graded"
TOKENIZER = Tokenizer.from_file(str(GRADED / "tokenizer.json"))


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def test_training_it_again_gives_the_released_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (GRADED / name).read_bytes()


def test_control_tokens_have_the_first_ids_and_one_id_each() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    for number, text in enumerate(CONTROL_TOKENS):
        assert _ids(text) == [number]
    assert CONTROL_TOKENS[:2] == ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")


def test_only_begin_and_end_vanish_when_special_tokens_are_skipped() -> None:
    ids = list(range(len(CONTROL_TOKENS)))
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "".join(CONTROL_TOKENS[2:])


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(_ids(text), skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*CONTROL_TOKENS, *protocol_pieces(), " ", "\n", "_", "a", "7", "é", "語"]), max_size=8)
)
def test_any_row_of_protocol_texts_comes_back(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert TOKENIZER.decode(_ids(text), skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789+-*=., ", max_size=40))
def test_a_digit_is_always_a_token_by_itself(text: str) -> None:
    pieces = [TOKENIZER.decode([token]) for token in _ids(text)]
    assert all(len(piece) == 1 for piece in pieces if any(map(str.isdigit, piece)))


def test_no_token_but_a_lone_digit_holds_a_digit() -> None:
    with_digit = [text for text in TOKENIZER.get_vocab() if any(character in "0123456789" for character in text)]
    assert sorted(with_digit) == list("0123456789")


@pytest.mark.parametrize("word", ALL_WORDS)
def test_every_word_of_the_lessons_is_one_token(word: str) -> None:
    assert len(_ids(word)) == 1
    assert len(_ids(f" {word}")) == 1


def test_constant_texts_of_the_protocol_are_cheap(encoder: Encoder) -> None:
    def size(**options: object) -> int:
        conversation = recipe.Conversation([recipe.UserMessage("q")], **options)  # type: ignore[arg-type]
        return len(encoder.recipe.encode(conversation))

    bare = size(thinking_mode=True, reasoning_effort="low")
    assert size(thinking_mode=True, reasoning_effort="high") - bare <= 3
    assert size(thinking_mode=True, reasoning_effort="max") - bare <= 3
    function = TOOL_FAMILY[0].schema()["function"]
    tool = recipe.ToolDefinition(function["name"], function["description"], function["parameters"])
    assert size(thinking_mode=True, reasoning_effort="low", tools=[tool]) - bare <= 60


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*CONTROL_TOKENS, "hi ", "\n"]), min_size=1, max_size=6).map("".join))
def test_control_tokens_that_a_user_spells_stay_text(text: str) -> None:
    encoding = Encoder(GRADED).recipe
    ids = encoding.encode(recipe.Conversation([recipe.UserMessage(text)], thinking_mode=False))
    bos, user, assistant, no_think = (
        0,
        *(CONTROL_TOKENS.index(t) for t in ("<｜User｜>", "<｜Assistant｜>", "</think>")),
    )
    assert ids[:2] == [bos, user]
    assert ids[-2:] == [assistant, no_think]
    inside = ids[2:-2]
    assert all(token >= len(CONTROL_TOKENS) for token in inside)
    assert TOKENIZER.decode(inside, skip_special_tokens=False) == text


def test_the_config_names_the_tokens_by_their_texts() -> None:
    config = json.loads((GRADED / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["bos_token"], config["eos_token"]) == CONTROL_TOKENS[:2]
    assert not config["add_bos_token"]
