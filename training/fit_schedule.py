"""Turns shares of time into steps on this machine: `python -m halocline.training.fit_schedule --help`.

The schedule that comes out names steps only, so that whoever has it can repeat the training on any machine.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.training.schedule import Phase, Schedule
from halocline.training.train import Trainer, rows_in

__all__ = ["CURRICULUM", "fit", "main"]

_logger = logging.getLogger(__name__)
_WARM_STEPS, _TIMED_STEPS = 3, 5
_WARM_UP = 200


def _phase(stage: str, rows: int, *, sparse: bool, quantized: bool, rates: tuple[float, float]) -> Phase:
    return Phase(
        stage=stage,
        steps=1,
        rows=rows,
        sparse=sparse,
        quantized=quantized,
        rate_start=rates[0],
        rate_end=rates[1],
    )


# Share of the time and what it is spent on: look-ups reach farther, then queries see the indexer's choice only, then
# everything is rounded as the release rounds it while the rate falls.
CURRICULUM: tuple[tuple[float, Phase], ...] = (
    (0.13, _phase("short", 64, sparse=False, quantized=False, rates=(2e-3, 2e-3))),
    (0.22, _phase("near", 32, sparse=False, quantized=False, rates=(2e-3, 2e-3))),
    (0.15, _phase("middle", 16, sparse=False, quantized=False, rates=(2e-3, 2e-3))),
    (0.13, _phase("middle", 16, sparse=True, quantized=False, rates=(2e-3, 1.5e-3))),
    (0.10, _phase("far", 5, sparse=True, quantized=False, rates=(1.5e-3, 1.2e-3))),
    (0.09, _phase("near", 32, sparse=True, quantized=True, rates=(1.2e-3, 8e-4))),
    (0.10, _phase("far", 5, sparse=True, quantized=True, rates=(8e-4, 4e-4))),
    (0.08, _phase("middle", 16, sparse=True, quantized=True, rates=(4e-4, 5e-5))),
)


def fit(trainer: Trainer, seconds: float) -> Schedule:
    """Measures each kind of step and gives every phase the steps that fit into its share of the time.

    Args:
        trainer: Fresh; its parameters are spent by this.
        seconds: Time for the whole schedule.
    """
    phases = []
    for share, phase in CURRICULUM:
        trainer.schedule = Schedule(phases=(replace(phase, steps=10**9, rate_start=0.0, rate_end=0.0),))
        for number in range(_WARM_STEPS + _TIMED_STEPS):
            if number == _WARM_STEPS:
                begun = time.perf_counter()
            float(trainer.run_step()["main"])
        each = (time.perf_counter() - begun) / _TIMED_STEPS
        _logger.info("%s: %.1f ms a step", phase, 1000 * each)
        phases.append(replace(phase, steps=max(1, round(share * seconds / each))))
    warm_up = replace(phases[0], steps=_WARM_UP, rate_start=1e-5)
    return Schedule(phases=(warm_up, *phases))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.backends.cuda.matmul.allow_tf32 = True
    rows = rows_in(chosen.rows, {phase.stage for _, phase in CURRICULUM})
    schedule = Schedule(phases=tuple(phase for _, phase in CURRICULUM))
    config = DeepseekV4Config.from_file(chosen.config)
    trainer = Trainer(config=config, schedule=schedule, rows=rows, seed=0, device=chosen.device)
    fit(trainer, chosen.seconds).write(chosen.out)


if __name__ == "__main__":
    main()
