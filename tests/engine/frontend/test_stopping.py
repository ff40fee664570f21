"""Stop strings and held-back characters, with the numbers of public reports."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.engine.detokenizer import Detokenizer, TextStream
from halocline.engine.stopping import StopStrings


def through(stops, pieces):
    stream = StopStrings(stops)
    deltas = [stream.push(piece) for piece in pieces]
    return [*deltas, stream.flush()], stream.found


def test_text_that_may_begin_a_stop_string_is_held_back():
    # vllm-project/vllm#3574
    deltas, found = through(["WXYZ"], ["ab", "W", "X", "Yq", "WXY", "Z!"])
    assert deltas == ["ab", "", "", "WXYq", "", "", ""]
    assert found == "WXYZ"


def test_what_was_held_back_comes_out_at_the_end():
    deltas, found = through(["WXYZ"], ["abWX"])
    assert deltas == ["ab", "WX"]
    assert found is None


def test_nothing_comes_after_a_stop_string():
    deltas, _ = through(["."], ["a.b", "c"])
    assert deltas == ["a", "", ""]


def test_of_several_the_first_to_be_complete_wins():
    assert through(["bcd", "c"], ["abcd"]) == (["ab", ""], "c")
    assert through(["bc", "c"], ["abcd"]) == (["a", ""], "bc")


def test_a_beginning_inside_a_beginning_is_found():
    assert through(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], "aab")


def earliest_end(text, stops):
    """Output and stop string by trying every end, the longest stop string first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_the_result_does_not_depend_on_the_pieces(stops, pieces):
    deltas, found = through(stops, pieces)
    assert ("".join(deltas), found) == earliest_end("".join(pieces), stops)


def bytes_of(small, text):
    """The id of each byte, in a tokenizer that has one for each."""
    of_byte = {small.token_bytes(i): i for i in range(8, small.vocab_size) if len(small.token_bytes(i)) == 1}
    return [of_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", ["한국어 글", "👨‍👩‍👧‍👦 family", "naïve café", "e\u0301 🇩🇪"])
def test_characters_split_at_every_byte_are_whole_in_every_delta(small, text):
    # ai-dynamo/dynamo#12630
    detokenizer = Detokenizer(small)
    deltas = [detokenizer.push(token_id) for token_id in bytes_of(small, text)]
    assert detokenizer.flush() == ""
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)


def test_an_incomplete_character_is_flushed_at_the_end(small):
    # Luce-Org/lucebox#641: the same in stream and non-stream
    ids = bytes_of(small, "ab한")[:-1]
    stream = TextStream(small)
    streamed = stream.push(ids[:3]) + stream.push(ids[3:]) + stream.finish()
    assert streamed == small.decode(ids) == "ab\ufffd"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 265), max_size=20), cut=st.integers(0, 20))
def test_stream_and_whole_agree_on_any_tokens(small, ids, cut):
    stream = TextStream(small)
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish() == small.decode(ids)


def test_stop_strings_span_tokens_and_begin_and_end_inside_them(released):
    # ggml-org/llama.cpp#11538, vllm-project/vllm#3672
    text = "The answer is forty-two, obviously."
    ids = released.encode(text)
    pieces = [released.decode([token_id]) for token_id in ids]
    stop = "swer is for"
    assert not any(stop in piece for piece in pieces)
    for stops in ([stop], ["never", stop]):
        stream = TextStream(released, stops)
        output = "".join([*(stream.push([token_id]) for token_id in ids), stream.finish()])
        assert (output, stream.stop_found) == ("The an", stop)
        assert released.decode(ids[: stream.num_tokens]).startswith("The answer is for")
        assert stop not in released.decode(ids[: stream.num_tokens - 1])


def test_tokens_after_a_stop_string_in_the_same_piece_are_not_taken(small):
    stream = TextStream(small, ["b"])
    assert stream.push(bytes_of(small, "abcd")) == "a"
    assert stream.num_tokens == 2


def test_stop_strings_wait_for_min_tokens(small):
    stream = TextStream(small, ["b"], min_tokens=2)
    assert stream.push(bytes_of(small, "abcbd")) == "abc"
    assert stream.stop_found == "b"
    assert stream.num_tokens == 4


def test_hidden_tokens_are_no_text(small):
    stream = TextStream(small)
    end = small.control_id("<｜end▁of▁sentence｜>")
    think = small.control_id("</think>")
    assert stream.push([*bytes_of(small, "a"), end, think]) + stream.finish() == "a</think>"
