"""``halocline eval``: what it prints and refuses, and the gate; on a tiny random model, which answers nothing right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halocline.engine.graded_model import find_graded_model, graded_model
from halocline.hal.errors import CheckpointError
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset

Run = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a suite of its own: three short exercises, and two texts."""
    folder = tmp_path_factory.mktemp("eval") / "tiny"
    make_checkpoint(folder, preset("tiny"), seed=1)
    suites = folder / "suites"
    suites.mkdir()
    lines = (graded_model() / "suites" / "quick.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    (suites / "quick.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = [{"name": f"text-{i}", "text": text} for i, text in enumerate(("The sea is salt.", "Rivers are fresh."))]
    (suites / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return folder


def _command(model: Path, *more: object) -> tuple[object, ...]:
    return ("eval", "--model", model, "--suite", "quick", "--recipe", "float32", "--cache-bytes", 2**26, *more)


def test_json_has_a_score_and_an_entry_for_each_lesson(halocline: Run, model: Path, capsys) -> None:
    assert halocline(*_command(model, "--json", "--text")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["score"] == 0.0
    assert report["lessons"] == {"sums": {"score": 0.0, "right": 0, "total": 3}}
    assert [answer["name"] for answer in report["answers"]] == ["sums-0", "sums-1", "sums-2"]
    assert report["recipe"] == "float32"
    assert report["perplexity"] > 100  # of 512 tokens, for a model that knows nothing
    assert 0.0 <= report["draft_acceptance"] <= 1.0


def test_a_second_run_agrees_with_the_first_one(halocline: Run, model: Path, capsys, tmp_path: Path) -> None:
    assert halocline(*_command(model, "--json")) == 0
    (tmp_path / "first.json").write_text(capsys.readouterr().out)
    again = _command(model, "--no-prefix-cache", "--max-requests", 1, "--step-tokens", 5)
    assert halocline(*again, "--compare-with", tmp_path / "first.json") == 0
    out = capsys.readouterr().out
    assert "1.000 of 3 answers are the same" in out
    assert ["all", "0", "3", "0.000"] in [line.split() for line in out.splitlines()]


def test_prompts_that_were_read_before_come_from_the_prefix_cache(
    halocline: Run, model: Path, capsys, tmp_path: Path
) -> None:
    """A prompt of several pages of 256 tokens; the answer is the same."""
    folder = tmp_path / "tiny"
    shutil.copytree(model, folder)
    lines = (graded_model() / "suites" / "quick.jsonl").read_text(encoding="utf-8").splitlines()
    long = next(line for line in lines if json.loads(line)["name"] == "lookup-400-0")
    (folder / "suites" / "quick.jsonl").write_text(long + "\n", encoding="utf-8")
    reports = []
    for more in ((), ("--warm",), ("--warm", "--no-prefix-cache")):
        assert halocline(*_command(folder, "--json", *more)) == 0
        reports.append(json.loads(capsys.readouterr().out))
    whole_pages = (reports[0]["prompt_tokens"] - 1) // 256 * 256
    assert whole_pages >= 256
    assert [report["cached_tokens"] for report in reports] == [0, whole_pages, 0]
    assert len({report["answers"][0]["output"] for report in reports}) == 1


def test_a_score_below_the_gate_fails(halocline: Run, model: Path) -> None:
    assert halocline(*_command(model, "--at-least", 0.5)) == 1


def test_longer_prompts_can_be_left_out(halocline: Run, model: Path, capsys) -> None:
    assert halocline(*_command(model, "--json", "--longest-prompt", 13)) == 0
    assert [a["name"] for a in json.loads(capsys.readouterr().out)["answers"]] == ["sums-0", "sums-1"]
    assert halocline(*_command(model, "--longest-prompt", 1)) == 2
    assert "no exercise is left" in capsys.readouterr().err


def test_an_unknown_suite_is_refused(halocline: Run, model: Path, capsys) -> None:
    assert halocline("eval", "--model", model, "--suite", "quik") == 2
    assert "quick, check, graded" in capsys.readouterr().err


def test_a_file_without_answers_is_refused_before_the_model_is_loaded(halocline: Run, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.json").write_text("{}")
    assert halocline("eval", "--model", tmp_path / "nowhere", "--compare-with", tmp_path / "empty.json") == 2
    assert "holds no answers" in capsys.readouterr().err


def test_a_bare_wheel_says_that_it_has_no_graded_model(halocline: Run, monkeypatch, capsys) -> None:
    monkeypatch.setattr("halocline.engine.graded_model._places", lambda: (Path("/nowhere/graded"),))
    assert find_graded_model() is None
    assert halocline("eval") == 2
    error = capsys.readouterr().err
    assert "the graded model is not installed" in error
    assert "--model DIR" in error


def test_the_graded_model_is_found_where_images_put_it(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("halocline.engine.graded_model.__file__", str(tmp_path / "wheel" / "engine" / "x.py"))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(CheckpointError):
        graded_model()
    place = tmp_path / "share" / "halocline" / "graded"
    place.mkdir(parents=True)
    shutil.copyfile(Path(__file__).parents[2] / "graded" / "config.json", place / "config.json")
    assert graded_model() == place
