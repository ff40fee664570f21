"""A short training on a CPU: it learns, it repeats, and it goes on from a saved state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from halocline.models.deepseek_v4.presets import TINY
from halocline.training.rows import KIND_REPLY, pack
from halocline.training.schedule import Phase, Schedule, load_schedule
from halocline.training.state import load_state, save_state
from halocline.training.train import Trainer

CONFIG = TINY.replace(vocab_size=64, hidden_size=32, num_attention_heads=2, o_groups=2)


def _schedule(steps: int) -> Schedule:
    def phase(count: int, *, late: bool) -> Phase:
        rates = {"rate_start": 3e-3, "rate_end": 3e-3}
        return Phase(stage="periodic", steps=count, rows=2, sparse=late, quantized=late, **rates)

    return Schedule(phases=(phase(steps - steps // 4, late=False), phase(steps // 4, late=True)))


def _periodic_rows() -> np.ndarray:
    """Rows that repeat a few tokens: what comes next is certain after the first period."""
    rng = np.random.default_rng(0)
    rows = [np.resize(rng.permutation(np.arange(8, 16))[:4], 129) for _ in range(8)]
    return np.stack([pack(row, np.full(129, KIND_REPLY, dtype=np.uint16)) for row in rows])


def _trainer(schedule: Schedule) -> Trainer:
    return Trainer(config=CONFIG, schedule=schedule, rows={"periodic": _periodic_rows()}, seed=1, device="cpu")


@pytest.fixture(scope="module")
def trained() -> tuple[Trainer, list[float]]:
    trainer = _trainer(_schedule(20))
    return trainer, [float(trainer.run_step()["main"]) for _ in range(20)]


def test_twenty_steps_lower_the_loss(trained) -> None:
    _, curve = trained
    assert curve[-1] < 0.6 * curve[0]


def test_the_same_seed_gives_the_same_curve(trained) -> None:
    _, curve = trained
    again = _trainer(_schedule(20))
    assert [float(again.run_step()["main"]) for _ in range(3)] == curve[:3]


def test_a_saved_state_goes_on_close_to_where_it_stopped(trained, tmp_path: Path) -> None:
    trainer, _ = trained
    save_state(tmp_path, trainer.parameters, trainer.optimizer, step=trainer.step)
    resumed = _trainer(_schedule(24))
    resumed.step = load_state(tmp_path, resumed.parameters, resumed.optimizer)
    assert resumed.step == 20
    for name, tensor in trainer.parameters.items():
        torch.testing.assert_close(resumed.parameters[name], tensor, atol=1e-6, rtol=2**-8)
    trainer.schedule = resumed.schedule
    kept, went_on = trainer.run_step(), resumed.run_step()
    assert float(went_on["main"]) == pytest.approx(float(kept["main"]), rel=0.02)


def test_selection_biases_move_towards_balance(trained) -> None:
    trainer, _ = trained
    for bias in trainer.biases:
        assert 0 < float(bias.abs().max()) <= 20 * 1e-3 + 1e-6


def test_a_schedule_survives_its_file(tmp_path: Path) -> None:
    schedule = _schedule(20)
    schedule.write(tmp_path / "schedule.json")
    assert load_schedule(tmp_path / "schedule.json") == schedule
    assert json.loads((tmp_path / "schedule.json").read_text())[0]["steps"] == 15
    phase, rate, earlier = schedule.at(16)
    assert (phase.sparse, rate, earlier) == (True, 3e-3, 16)
