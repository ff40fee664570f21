"""Rows of training tokens: reproducible, whole exercises only, and marked for the loss."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from halocline.training.build_rows import main
from halocline.training.data import Encoder, make_rows, token_kinds
from halocline.training.lessons.registry import LESSONS
from halocline.training.render import encode_item, render_item
from halocline.training.rows import KIND_PROMPT, KIND_REPLY, KIND_TEXT, batch_at, load_rows, write_rows
from halocline.training.stages import STAGES, Stage

TOKEN = (1 << 10) - 1


@pytest.mark.parametrize("stage", ["tiny", "short", "far"])
def test_a_row_depends_on_its_number_alone(encoder: Encoder, stage: str) -> None:
    together = make_rows(encoder, STAGES[stage], seed=1, start=0, count=3)
    alone = make_rows(encoder, STAGES[stage], seed=1, start=2, count=1)
    assert np.array_equal(together[2], alone[0])
    assert not np.array_equal(together[1], alone[0])
    other = make_rows(encoder, STAGES[stage], seed=2, start=2, count=1)
    assert not np.array_equal(other, alone)


@pytest.mark.parametrize("lesson", LESSONS)
def test_exactly_the_replies_are_marked(encoder: Encoder, lesson: str) -> None:
    for index in range(10):
        item = LESSONS[lesson](5, index, "train")
        ids = encode_item(encoder.recipe, item, 1)
        kinds = token_kinds(ids)
        whole = render_item(item)
        text = whole.prompt + whole.target
        # Independent of ids: a reply is what stands between the last mark of a turn and its end.
        turns = text.split("<｜Assistant｜>")[1:]
        replies = []
        for turn in turns:
            reply = turn[: turn.index("<｜end▁of▁sentence｜>")]
            replies.append(reply.removeprefix("<think>" if reply.startswith("<think>") else "</think>"))
        marked = [token for token, kind in zip(ids, kinds, strict=True) if kind == KIND_REPLY]
        decoded = encoder.tokenizer.decode(marked, skip_special_tokens=False)
        assert decoded == "".join(f"{reply}<｜end▁of▁sentence｜>" for reply in replies)


def test_a_row_is_whole_documents_and_one_cut_text_at_the_end(encoder: Encoder) -> None:
    rows = make_rows(encoder, STAGES["short"], seed=0, start=0, count=8)
    assert (rows >> 10 == KIND_REPLY).mean() > 0.15
    for row in rows:
        tokens, kinds = row & TOKEN, row >> 10
        assert tokens[0] == 0
        starts = [*np.flatnonzero(tokens == 0), len(tokens)]
        for begin, end in pairwise(starts[:-1]):
            assert tokens[end - 1] == 1
            assert set(kinds[begin:end]) <= {KIND_PROMPT, KIND_REPLY, KIND_TEXT}


def test_long_rows_ask_across_most_of_their_length(encoder: Encoder) -> None:
    rows = make_rows(encoder, STAGES["far"], seed=0, start=0, count=6) & TOKEN
    longest = [max(np.diff([*np.flatnonzero(row == 0), len(row)])) for row in rows]
    assert max(longest) > 4000


def test_every_row_comes_once_an_epoch_and_steps_can_be_resumed() -> None:
    rows = np.repeat(np.arange(10, dtype=np.uint16)[:, None], 5, axis=1)
    seen = np.concatenate([batch_at(rows, seed=3, step=step, batch=4).tokens_BT[:, 0] for step in range(5)])
    assert sorted(seen[:10]) == list(range(10))
    assert sorted(seen[10:]) == list(range(10))
    assert not np.array_equal(seen[:10], seen[10:])
    again = batch_at(rows, seed=3, step=3, batch=4)
    assert np.array_equal(again.tokens_BT[:, 0], seen[12:16])


def test_targets_follow_their_tokens_and_carry_their_kind() -> None:
    rows = np.array([[5, 6, 7 | KIND_REPLY << 10, 1 | KIND_TEXT << 10]], dtype=np.uint16)
    batch = batch_at(rows, seed=0, step=0, batch=1)
    assert batch.tokens_BT.tolist() == [[5, 6, 7]]
    assert batch.targets_BT.tolist() == [[6, 7, 1]]
    assert batch.kinds_BT.tolist() == [[KIND_PROMPT, KIND_REPLY, KIND_TEXT]]


@pytest.mark.parametrize("name", ["rows.npy", "rows.npy.xz"])
def test_rows_come_back_from_a_file(tmp_path: Path, name: str) -> None:
    rows = np.arange(60, dtype=np.uint16).reshape(4, 15)
    write_rows(tmp_path / name, rows)
    assert np.array_equal(load_rows(tmp_path / name), rows)


def test_workers_build_what_one_process_makes(tmp_path: Path, encoder: Encoder, graded: Path) -> None:
    out = tmp_path / "rows.npy"
    main(f"--stage tiny --rows 5 --seed 9 --workers 2 --tokenizer {graded} --out {out}".split())
    assert np.array_equal(load_rows(out), make_rows(encoder, STAGES["tiny"], seed=9, start=0, count=5))


def test_a_stage_refuses_look_ups_longer_than_its_rows() -> None:
    with pytest.raises(ValueError, match="long look-ups of 100 to 600 tokens in 512"):
        Stage(name="wrong", length=512, long_lookup_share=1.0, long_lookup=(100, 600))


def test_reading_rows_and_probes_needs_numpy_alone() -> None:
    code = (
        "import sys; import halocline.training.rows, halocline.training.probe;"
        "sys.exit(' '.join({'deepseek_recipe', 'tokenizers', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stderr.strip() == b""
