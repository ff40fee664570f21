"""What training does, step by step: a list of phases, kept as JSON beside the shipped model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Phase", "Schedule", "load_schedule"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps that are alike.

    Attributes:
        stage: Name of the rows (a stage of the curriculum).
        steps: Optimiser steps.
        rows: Rows of a step.
        sparse: Queries see the indexer's choice; otherwise all closed blocks while the indexer learns.
        quantized: Round weights, activations and cached rows as the release does.
        rate_start: Learning rate at the first step; it moves linearly over the phase.
        rate_end: Learning rate at the last step.
    """

    stage: str
    steps: int
    rows: int
    sparse: bool
    quantized: bool
    rate_start: float
    rate_end: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All phases, in order."""

    phases: tuple[Phase, ...]

    @property
    def num_steps(self) -> int:
        """Optimiser steps in all."""
        return sum(phase.steps for phase in self.phases)

    def at(self, step: int) -> tuple[Phase, float, int]:
        """The phase of a step, its learning rate, and how many steps of the same stage came before it."""
        first, used = 0, dict.fromkeys((phase.stage for phase in self.phases), 0)
        for phase in self.phases:
            if step < first + phase.steps:
                share = (step - first) / max(phase.steps - 1, 1)
                rate = phase.rate_start + (phase.rate_end - phase.rate_start) * share
                return phase, rate, used[phase.stage] + step - first
            first += phase.steps
            used[phase.stage] += phase.steps
        raise IndexError(f"step {step} of a schedule of {self.num_steps}")

    def write(self, path: Path) -> None:
        """Writes JSON that `load_schedule` reads."""
        path.write_text(json.dumps([asdict(phase) for phase in self.phases], indent=1) + "\n", encoding="utf-8")


def load_schedule(path: Path) -> Schedule:
    """Reads a schedule."""
    return Schedule(phases=tuple(Phase(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))))
