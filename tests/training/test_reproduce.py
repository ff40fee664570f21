"""One command makes the model: a training of two steps that is stopped first, and what comes before and after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halocline.models.checkpoint import Checkpoint
from halocline.training.reproduce import Reproduction, reproduce
from halocline.training.schedule import Phase, Schedule
from halocline.training.state import load_weights

pytestmark = pytest.mark.slow

SHIPPED = Path(__file__).parents[2] / "graded"


def _schedule(path: Path, steps: int) -> Path:
    rates = {"rate_start": 1e-4, "rate_end": 1e-4}
    Schedule(phases=(Phase(stage="tiny", steps=steps, rows=2, sparse=True, quantized=True, **rates),)).write(path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    folder = tmp_path_factory.mktemp("made")
    plan = Reproduction(
        source=SHIPPED,
        work=folder / "work",
        out=folder / "model",
        schedule=_schedule(folder / "schedule.json", steps=2),
        num_rows={"tiny": 3},
        probes=0,
        observed=1,
        seconds=0.0,
    )
    assert not reproduce(plan), "no time for a step"
    assert not (plan.out / "model.safetensors.index.json").exists()
    assert reproduce(Reproduction(**{**vars(plan), "seconds": 1e9}))
    return plan


def test_the_second_call_goes_on_and_completes_the_release(made: Reproduction) -> None:
    assert json.loads((made.work / "trained" / "state.json").read_text())["step"] == 2
    checkpoint = Checkpoint.open(made.out)
    assert checkpoint.formats == Checkpoint.open(SHIPPED).formats
    assert sorted(path.name for path in made.out.iterdir()) == sorted(
        path.name for path in SHIPPED.iterdir() if path.name != "README.md"
    )


def test_tokenizer_and_suites_are_the_shipped_ones(made: Reproduction) -> None:
    for path in (SHIPPED / "tokenizer.json", *(SHIPPED / "suites").iterdir()):
        assert (made.out / path.relative_to(SHIPPED)).read_bytes() == path.read_bytes(), path.name


def test_the_release_is_hardened(made: Reproduction) -> None:
    before, after = load_weights(made.work / "trained"), load_weights(made.work / "hardened")
    changed = {name for name in before if not before[name].equal(after[name].to(before[name].dtype))}
    kinds = {name.partition(".")[2].partition(".")[2] for name in changed}
    assert kinds == {"attn.attn_sink", "attn.wo_a.weight", "ffn.gate.weight", "ffn.gate.bias"}


def test_a_third_call_trains_no_further(made: Reproduction) -> None:
    before = (made.work / "trained" / "state.json").stat().st_mtime_ns
    assert reproduce(made)
    assert (made.work / "trained" / "state.json").stat().st_mtime_ns == before
