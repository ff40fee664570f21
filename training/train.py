"""Trains the graded model: `python -m halocline.training.train --help`.

One command with a seed and a schedule reproduces a training; `--seconds` stops it early and `--resume` goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW

from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.training.model import ForwardResult, TrainingForward, losses
from halocline.training.parameters import initial_parameters, is_indexer
from halocline.training.probe import Probe, exact_share, load_probes
from halocline.training.rows import batch_at, load_rows
from halocline.training.schedule import Phase, Schedule, load_schedule
from halocline.training.state import load_state, save_state

__all__ = ["Trainer", "main", "rows_in"]

_logger = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.05
_LARGEST_GRADIENT = 1.0
_BALANCE_RATE = 1e-3
_SAMPLED_POSITIONS = 96
_LOG_EVERY = 20
_PROBE_TOKENS = 1 << 15


@dataclass(eq=False, kw_only=True)
class Trainer:
    """Parameters, optimiser and rows of one training.

    Attributes:
        config: The model.
        schedule: Phases.
        rows: Packed rows by stage.
        seed: Of initial numbers, row order and sampled positions.
        device: Where, in torch's words.
    """

    config: DeepseekV4Config
    schedule: Schedule
    rows: dict[str, np.ndarray[Any, np.dtype[np.uint16]]]
    seed: int
    device: str

    def __post_init__(self) -> None:
        self.step = 0
        self.parameters = initial_parameters(self.config, seed=self.seed, device=self.device)
        self.trained = {
            name: tensor.requires_grad_()
            for name, tensor in self.parameters.items()
            if tensor.is_floating_point() and not name.endswith("gate.bias")
        }
        self.biases = [self.parameters[name] for name in self._bias_names()]
        decays = [p for p in self.trained.values() if p.dim() > 1]
        others = [p for p in self.trained.values() if p.dim() <= 1]
        groups = [{"params": decays, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = AdamW(groups, lr=0.0, betas=_BETAS, fused=True)
        self.forward = TrainingForward(config=self.config, device=self.device)

    def _bias_names(self) -> list[str]:
        """Selection biases in the order in which a forward pass routes: main layers, then draft layers."""
        names = [name for name in self.parameters if name.endswith("gate.bias")]
        return sorted(names, key=lambda name: (name.startswith("mtp."), int(name.split(".")[1])))

    def run_step(self) -> dict[str, Tensor]:
        """One optimiser step; returns scalars that stay on the device."""
        phase, rate, stage_step = self.schedule.at(self.step)
        batch = batch_at(self.rows[phase.stage], seed=self.seed, step=stage_step, batch=phase.rows)
        tokens_BT, targets_BT, kinds_BT = (torch.from_numpy(part).to(self.device) for part in batch)
        result = self.forward(
            self.parameters,
            tokens_BT,
            quantized=phase.quantized,
            sparse=phase.sparse,
            sampled_T=self._sampled(tokens_BT.shape[1]),
        )
        scored = losses(result, targets_BT, kinds_BT.long())
        self._differentiate(scored.main, scored.index_kl)
        norm = torch.nn.utils.clip_grad_norm_(self._group(indexer=False), _LARGEST_GRADIENT)
        torch.nn.utils.clip_grad_norm_(self._group(indexer=True), _LARGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._balance(result)
        self.step += 1
        return {
            "main": scored.main.detach(),
            "index": scored.index_kl.detach(),
            "reply_accuracy": scored.reply_accuracy,
            "draft_accuracy": scored.draft_accuracy,
            "norm": norm,
        }

    def _group(self, *, indexer: bool) -> list[Tensor]:
        return [p for name, p in self.trained.items() if is_indexer(name) is indexer]

    def _differentiate(self, main: Tensor, index: Tensor) -> None:
        """The index loss moves indexers alone; the main loss moves everything else."""
        for indexer, loss in ((True, index), (False, main)):
            group = self._group(indexer=indexer)
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, group, retain_graph=indexer, allow_unused=True)
            for parameter, grad in zip(group, grads, strict=True):
                # The fused optimiser wants the gradient's strides to be the parameter's.
                parameter.grad = (
                    torch.zeros_like(parameter) if grad is None else torch.empty_like(parameter).copy_(grad)
                )

    def _sampled(self, length: int) -> Tensor:
        """Positions whose index scores are trained, the same for all rows of a step."""
        gen = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        count = min(_SAMPLED_POSITIONS, length - 8)
        return (8 + torch.randperm(length - 8, generator=gen)[:count]).sort().values.to(self.device)

    @torch.no_grad()
    def _balance(self, result: ForwardResult) -> None:
        """Raises the selection bias of experts that were chosen less than the mean, and lowers the others."""
        for bias, load in zip(self.biases, result.recorder.loads, strict=True):
            bias.add_(_BALANCE_RATE * torch.sign(load.mean() - load))

    @torch.no_grad()
    def exact_share(self, probe: Probe, phase: Phase) -> float:
        """Share of held-out exercises whose whole reply would be decoded greedily, in the numerics of a phase."""
        num_rows, length = probe.tokens_BT.shape
        step = max(1, _PROBE_TOKENS // length)
        predicted = []
        for start in range(0, num_rows, step):
            tokens_BT = torch.from_numpy(probe.tokens_BT[start : start + step]).to(self.device)
            result = self.forward(
                self.parameters,
                tokens_BT,
                quantized=phase.quantized,
                sparse=phase.sparse,
                sampled_T=self._sampled(length),
            )
            predicted.append(result.logits_BTV.argmax(-1).cpu())
        return exact_share(probe, torch.cat(predicted).numpy())


def _train(trainer: Trainer, seconds: float, log: Path) -> Iterator[Phase]:
    """Runs until the schedule or the time is over; yields each phase that ends."""
    begun = time.perf_counter()
    with log.open("a", encoding="utf-8") as file:
        last: Phase | None = None
        while trainer.step < trainer.schedule.num_steps and time.perf_counter() - begun < seconds:
            phase, rate, _ = trainer.schedule.at(trainer.step)
            if last is not None and phase != last:
                yield last
            last = phase
            scalars = trainer.run_step()
            if trainer.step % _LOG_EVERY == 0:
                row: dict[str, object] = {name: round(float(value), 5) for name, value in scalars.items()}
                row |= {"step": trainer.step, "stage": phase.stage, "rate": rate}
                row["seconds"] = round(time.perf_counter() - begun, 1)
                _logger.info("%s", row)
                file.write(json.dumps(row) + "\n")
        if last is not None:
            yield last


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model, or its folder")
    parser.add_argument("--schedule", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="folder of <stage>.npy, or .npy.xz, training rows")
    parser.add_argument("--probes", type=Path, help="held-out exercises, marked after each phase")
    parser.add_argument("--out", type=Path, required=True, help="folder for state and curves")
    parser.add_argument("--resume", type=Path, help="folder of an earlier state")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser


def rows_in(folder: Path, stages: set[str]) -> dict[str, np.ndarray[Any, np.dtype[np.uint16]]]:
    """The rows of each stage, from `<stage>.npy` or `<stage>.npy.xz`."""
    found = {}
    for stage in sorted(stages):
        plain = folder / f"{stage}.npy"
        found[stage] = load_rows(plain if plain.exists() else folder / f"{stage}.npy.xz")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    chosen = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.backends.cuda.matmul.allow_tf32 = True
    schedule = load_schedule(chosen.schedule)
    trainer = Trainer(
        config=DeepseekV4Config.from_file(chosen.config),
        schedule=schedule,
        rows=rows_in(chosen.rows, {phase.stage for phase in schedule.phases}),
        seed=chosen.seed,
        device=chosen.device,
    )
    if chosen.resume:
        trainer.step = load_state(chosen.resume, trainer.parameters, trainer.optimizer)
    chosen.out.mkdir(parents=True, exist_ok=True)
    probes = load_probes(chosen.probes) if chosen.probes else []
    with (chosen.out / "scores.jsonl").open("a", encoding="utf-8") as file:
        for phase in _train(trainer, chosen.seconds, chosen.out / "curve.jsonl"):
            score = {probe.group: round(trainer.exact_share(probe, phase), 4) for probe in probes}
            _logger.info("held out after step %d: %s", trainer.step, score)
            file.write(json.dumps({"step": trainer.step, "stage": phase.stage, **score}) + "\n")
    save_state(chosen.out, trainer.parameters, trainer.optimizer, step=trainer.step)
    _logger.info("stopped after step %d of %d", trainer.step, schedule.num_steps)


if __name__ == "__main__":
    main()
