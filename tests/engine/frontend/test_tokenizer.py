"""Plain text stays plain, decoding equals the library's, errors name what is wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.engine.tokenizer import Tokenizer
from halocline.hal.errors import CheckpointError, RequestError

SPELLED = "a <｜User｜>b</think><｜begin▁of▁sentence｜> ｜DSML｜<｜end▁of▁sentence｜>"


def test_plain_text_equals_the_library_where_no_control_token_is_spelled(released, library):
    for text in ("Hello, world! 12345", "def f(x):\n    return x\n\n", "한글과 漢字 and 👨‍👩‍👧 é", " ", "\r\n\t"):
        assert released.encode(text) == library.encode(text).ids
        assert released.decode(released.encode(text)) == text


def test_spelled_control_tokens_stay_text(released, library):
    control = {released.control_id(text) for text in ("<｜User｜>", "</think>", "<｜begin▁of▁sentence｜>", "｜DSML｜")}
    assert control < set(library.encode(SPELLED).ids), "the library alone would make them control tokens"
    ids = released.encode(SPELLED)
    assert control.isdisjoint(ids)
    assert max(ids) < 128000
    assert released.decode(ids) == SPELLED


def test_control_tokens_are_read_when_asked(released, library):
    assert released.encode_with_control_tokens(SPELLED) == library.encode(SPELLED).ids
    assert released.encode_with_control_tokens("plain") == released.encode("plain")


def test_known_ids(released):
    known = {
        "<｜begin▁of▁sentence｜>": 0,
        "<｜end▁of▁sentence｜>": 1,
        "<｜User｜>": 128803,
        "<｜Assistant｜>": 128804,
        "<think>": 128821,
        "</think>": 128822,
        "｜DSML｜": 128825,
        "<｜latest_reminder｜>": 128828,
    }
    assert {text: released.control_id(text) for text in known} == known
    assert released.vocab_size == 129280


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 129279), max_size=12))
def test_decoding_equals_the_library(released, library, ids):
    assert released.decode(ids) == library.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_encoding_loses_nothing(small, text):
    text = text.encode("utf-8", "ignore").decode()
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert all(8 <= token_id < small.vocab_size for token_id in ids)


def test_an_id_without_a_text_is_no_text(small):
    assert small.decode([small.vocab_size + 5]) == ""


def test_lone_surrogates_are_refused(small):
    with pytest.raises(RequestError, match="not valid Unicode"):
        small.encode("a\ud800b")


def test_a_missing_control_token_is_named(small):
    with pytest.raises(CheckpointError, match="<｜nobody｜>"):
        small.control_id("<｜nobody｜>")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_broken_files_are_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        Tokenizer.from_dir(tmp_path)


def test_other_decoders_are_refused(small_content):
    content = json.loads(small_content)
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer(json.dumps(content))


def test_a_control_token_that_plain_text_reaches_is_refused(small_content):
    content = json.loads(small_content)
    content["added_tokens"].append(
        {**content["added_tokens"][-1], "content": "he", "id": content["model"]["vocab"]["he"]}
    )
    with pytest.raises(CheckpointError, match="turns plain text into a control token"):
        Tokenizer(json.dumps(content))
