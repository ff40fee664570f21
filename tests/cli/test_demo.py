"""``halocline demo``: its golden tokens come from Transformers' model, and a wrong token is an error."""

from __future__ import annotations

import pytest
import torch

from halocline.cli import demo
from halocline.engine.evaluation import Mark
from halocline.engine.graded_model import graded_model, suite_file
from halocline.engine.grading import load_suite
from halocline.engine.tokenizer import Tokenizer
from halocline.hal.errors import MachineError
from halocline.hal.formats import Weight
from halocline.hal.weight_codecs import dequantize
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint, write_checkpoint
from halocline.models.deepseek_v4.presets import TINY


def test_golden_tokens_are_those_of_transformers(tmp_path):
    from transformers import DeepseekV4ForCausalLM

    make_checkpoint(tmp_path / "release", TINY, seed=demo.SEED)
    with CheckpointSource(Checkpoint.open(tmp_path / "release")) as source:
        values = {
            name: dequantize(stored, torch.float32) if isinstance(stored, Weight) else stored
            for name, stored in source.everything()
        }
    plain = TINY.without_draft().unquantized("float32")
    write_checkpoint(tmp_path / "plain", plain, values, dialect="transformers")
    oracle = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    ids = [0, *Tokenizer.from_dir(tmp_path / "release").encode(demo.PROMPT)]
    assert len(ids) < 128 < len(ids) + len(demo.GOLDEN_IDS), "the answer crosses the first long compressed block"
    with torch.no_grad():
        logits = oracle(torch.tensor([[*ids, *demo.GOLDEN_IDS]])).logits[0, len(ids) - 1 : -1]
    best = logits.topk(2)
    assert tuple(best.indices[:, 0].tolist()) == demo.GOLDEN_IDS
    assert (best.values[:, 0] - best.values[:, 1]).min().item() > demo.LEAST_MARGIN


@pytest.fixture
def bare_wheel(monkeypatch):
    """Halocline without the graded model, as the wheel installs it."""
    monkeypatch.setattr("halocline.engine.graded_model._places", tuple)


@pytest.mark.slow
def test_the_graded_model_answers_each_kind_of_question(halocline, capsys):
    assert halocline("demo") == 0
    out = capsys.readouterr().out.splitlines()
    answers = [line for line in out if line.startswith(tuple(f"{what}: " for what in demo.EXERCISES))]
    assert [line.rpartition(": ")[2] for line in answers] == ["right"] * 4
    assert "746 + 919? -> 1665:" in answers[0]
    tokens_before = int(answers[1].split("after ")[1].split()[0].replace(",", ""))
    assert tokens_before >= 2000
    assert "find_thing(" in answers[3]
    assert sum(line.startswith("proven: ") for line in out) == 2
    assert sum(line.startswith("kernels ") for line in out) == 2


@pytest.fixture
def graded_marks():
    suite = {one.name: one for one in load_suite(suite_file(graded_model(), "quick"))}
    return (
        Mark(exercise=suite["sums-0"], output="107", is_right=True),
        Mark(exercise=suite["sums-1"], output="15", is_right=False),
    )


def test_a_wrong_answer_is_named(graded_marks):
    right, wrong = graded_marks
    demo.check_answers([right])
    with pytest.raises(MachineError, match="1 of 2 exercises wrong") as error:
        demo.check_answers([right, wrong])
    assert "sums-1" in str(error.value)
    assert "found     '15'" in str(error.value)


@pytest.mark.usefixtures("bare_wheel")
def test_a_bare_wheel_says_that_it_has_no_graded_model_and_runs_the_tiny_one(halocline, capsys):
    assert halocline("demo") == 0
    out = capsys.readouterr().out
    assert "the graded one is not installed" in out.splitlines()[0]
    assert ["attention.sparse_decode", "reference", "device"] in [line.split() for line in out.splitlines()]
    assert "ids: " + " ".join(map(str, demo.GOLDEN_IDS)) in out
    assert out.count("\nproven: ") == 1


@pytest.mark.usefixtures("bare_wheel")
def test_the_model_can_be_kept(halocline, tmp_path, capsys):
    assert halocline("demo", "--keep", tmp_path / "model") == 0
    assert Checkpoint.open(tmp_path / "model").nbytes > 0


CLEAR = [((token, -0.1), (5, -3.0)) for token in demo.GOLDEN_IDS]


def test_a_wrong_token_is_named():
    wrong = [*demo.GOLDEN_IDS[:7], 5, *demo.GOLDEN_IDS[8:]]
    with pytest.raises(MachineError, match="first at token 7"):
        demo.check_ids(wrong, CLEAR)


def test_too_few_tokens_are_wrong():
    with pytest.raises(MachineError, match="not the known ones"):
        demo.check_ids(demo.GOLDEN_IDS[:-1], CLEAR)


def test_a_close_call_is_refused_even_if_it_went_well():
    close = [*CLEAR[:-1], ((demo.GOLDEN_IDS[-1], -1.0), (5, -1.04))]
    with pytest.raises(MachineError, match=r"margin +0\.040"):
        demo.check_ids(demo.GOLDEN_IDS, close)
    assert demo.check_ids(demo.GOLDEN_IDS, CLEAR) == pytest.approx(2.9)


def test_a_wrong_kernel_is_caught(halocline, capsys, monkeypatch, bare_wheel):
    """A sampler that takes the runner-up must not pass for right."""
    from halocline.backends_reference import sampling

    original = sampling._first_largest

    def second(values):
        worse = values.clone()
        worse[original(values)] = -torch.inf
        return original(worse)

    monkeypatch.setattr(sampling, "_first_largest", second)
    assert halocline("demo") == 1
    assert "first at token 0" in capsys.readouterr().err
