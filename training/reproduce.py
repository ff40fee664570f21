"""Makes the graded model from nothing but a seed: `python -m halocline.training.reproduce --help`.

Tokenizer, training rows, probes, training, hardening, release, suites: one after the other, each left alone where its
result is there already. So the same command goes on where an earlier one stopped, be it by `--seconds` or by a fault.
The numbers below are those of the shipped model. Another machine or torch makes a model as good from them, not the same
bytes: sums of floats come in another order there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from halocline.training import build_probes, harden, train
from halocline.training.build_rows import build_rows
from halocline.training.release import release
from halocline.training.schedule import load_schedule
from halocline.training.suites import build_suites
from halocline.training.tokenizer import write_tokenizer

__all__ = ["NUM_ROWS", "Reproduction", "main", "reproduce"]

_logger = logging.getLogger(__name__)

NUM_ROWS: Mapping[str, int] = MappingProxyType({"short": 40_000, "near": 20_000, "middle": 10_000, "far": 4_000})
_RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What to make, from what, and where.

    Attributes:
        source: Folder with the config.json and generation_config.json of the model.
        work: Folder for rows, states and curves.
        out: Folder of the released model.
        schedule: Of the training.
        num_rows: Training rows by stage.
        device: That trains, in torch's words.
        workers: Processes that write rows.
        seconds: Stop training after this time; the next call goes on.
        seed: Of rows, initial numbers and row order.
        probes: Held-out exercises of each group, marked after each phase.
        observed: Exercises of each lesson that hardening looks at.
    """

    source: Path
    work: Path
    out: Path
    schedule: Path = _RESULTS / "schedule.json"
    num_rows: Mapping[str, int] = field(default_factory=lambda: NUM_ROWS)
    device: str = "cpu"
    workers: int = 1
    seconds: float = float("inf")
    seed: int = 0
    probes: int = 64
    observed: int = 24


def reproduce(plan: Reproduction) -> bool:
    """Makes what is missing; returns whether the model is complete, which it is not when training ran out of time."""
    _prepare_folder(plan)
    _write_rows(plan)
    trained = plan.work / "trained"
    if not _train(plan, plan.schedule, trained):
        _logger.info("training is not over; the same command goes on with it")
        return False
    hardened = plan.work / "hardened"
    if not _is_state(hardened):
        observed = ("--model", str(plan.out), "--count", str(plan.observed))
        harden.main(["--state", str(trained), "--out", str(hardened), *observed])
    checkpoint = release(hardened, plan.out)
    build_suites(plan.out)
    _logger.info("%s: %d bytes, matrices %s", plan.out, checkpoint.nbytes, checkpoint.formats)
    return True


def _prepare_folder(plan: Reproduction) -> None:
    plan.out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if not (plan.out / name).exists():
            shutil.copyfile(plan.source / name, plan.out / name)
    if not (plan.out / "tokenizer.json").exists():
        write_tokenizer(plan.out)


def _write_rows(plan: Reproduction) -> None:
    rows = plan.work / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    for stage, count in plan.num_rows.items():
        path = rows / f"{stage}.npy"
        if not path.exists():
            unfinished = rows / f"unfinished-{stage}.npy"
            build_rows(
                unfinished,
                tokenizer=plan.out,
                stage_name=stage,
                seed=plan.seed,
                num_rows=count,
                workers=plan.workers,
            )
            unfinished.rename(path)
    if plan.probes and not (rows / "probes.npz").exists():
        build_probes.main(
            ["--out", str(rows / "probes.npz"), "--tokenizer", str(plan.out), "--count", str(plan.probes)]
        )


def _is_state(folder: Path) -> bool:
    return (folder / "state.json").exists()


def _train(plan: Reproduction, schedule: Path, folder: Path) -> bool:
    """Trains until the schedule or the time is over; returns whether the schedule is."""
    num_steps = load_schedule(schedule).num_steps
    rows = plan.work / "rows"
    arguments = ["--config", plan.out, "--schedule", schedule, "--rows", rows, "--out", folder]
    arguments += ["--seed", plan.seed, "--device", plan.device, "--seconds", plan.seconds]
    if plan.probes:
        arguments += ["--probes", rows / "probes.npz"]
    if _is_state(folder):
        arguments += ["--resume", folder]
    if _steps_done(folder) < num_steps:
        train.main([str(argument) for argument in arguments])
    return _steps_done(folder) >= num_steps


def _steps_done(folder: Path) -> int:
    return int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"]) if _is_state(folder) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 3 when training ran out of its time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("graded"), help="folder of the model's config.json")
    parser.add_argument("--work", type=Path, required=True, help="folder for rows, states and curves")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model that is made")
    parser.add_argument("--device", default="cpu", help="that trains, in torch's words")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that write rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop training after this time")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return 0 if reproduce(Reproduction(**vars(chosen))) else 3


if __name__ == "__main__":
    raise SystemExit(main())
