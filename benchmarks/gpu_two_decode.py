"""Part of a GPU session on two ranks: decode steps of the whole model against the roof of two devices, mode by mode."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from halocline.benchmarks import device_clock
from halocline.benchmarks.decode_step import DecodeStep, distinct_experts, random_model
from halocline.benchmarks.gpu_engine import kernel_flags
from halocline.benchmarks.gpu_ranks import Rank, in_modes
from halocline.benchmarks.roofline import distinct_experts as expected_experts
from halocline.benchmarks.roofline_ranks import best_step
from halocline.models.deepseek_v4.presets import first_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from halocline.benchmarks.gpu_rows import Rows
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["two_decode"]

_KERNELS_SHOWN = 25
_EAGER_ROUNDS = 3  # where the host launches every kernel of a step


def two_decode(rows: Rows, options: argparse.Namespace) -> None:
    """Steps at each batch size of the whole machine; `--warm` runs every shape once on few layers and times nothing."""

    def work(rank: Rank) -> None:
        _Decode(rows, options, rank).run()

    warm = {"warm": True} if options.warm else {}
    in_modes(rows, options, options.modes or options.sizes.two_modes, work, **warm)


class _Decode:
    """What one rank of a mode does."""

    def __init__(self, rows: Rows, options: argparse.Namespace, rank: Rank) -> None:
        self._rows, self._options, self._rank = rows, options, rank
        self._config = _config(options)
        self._context = options.sizes.context
        self._params = {
            "mode": rank.name,
            "kernels": options.sets[0],
            "model": options.preset,
            "layers": self._config.num_hidden_layers,
            **({"warm": True} if options.warm else {}),
        }
        begun = time.perf_counter()
        self._model, table = random_model(
            self._config, kernel_flags(options.sets[0]), max_positions=self._context + 256, parallel=rank.parallel
        )
        device_clock.settle()
        device_clock.release()
        self._add("two_decode.weights", round(time.perf_counter() - begun, 2), "s")
        bound = {row["op"]: row["chosen"] for row in table.rows() if row["chosen"]}
        self._add("two_decode.kernels", bound, "kernels", params={**self._params, "table": table.digest})

    def _add(self, name: str, value: object, unit: str, *, params: dict[str, Any] | None = None, **rest: Any) -> None:
        self._rank.add(self._rows, name, value, unit, params=self._params if params is None else params, **rest)

    def run(self) -> None:
        """Every batch in which each rank has a row, then the traces: a profiler slows what follows it."""
        groups = self._rank.parallel.sizes.dp
        known = self._options.sizes.two_batches
        asked = [int(shape) for shape in self._options.shapes if int(shape) <= max(known)] or known
        batches = [batch for batch in asked if batch % groups == 0]
        for batch in batches:
            self._step(batch)
            device_clock.release()
        memory = self._rank.all(round(device_clock.used_gib(), 1))
        self._add("two_decode.memory", memory, "GiB of each rank")
        for batch in batches if self._options.trace and self._rank.mode.captures else ():
            self._trace(batch)

    def _placed(self, batch: int) -> DecodeStep:
        parallel = self._rank.parallel
        own = batch // parallel.sizes.dp
        step = DecodeStep(self._model, batch=own, max_positions=self._context + 256, seed=1 + parallel.dp_index)
        step.place([self._context] * own)
        return step

    def _step(self, batch: int) -> None:
        step = self._placed(batch)
        if self._options.warm:
            step.logits()
            device_clock.settle()
            return
        params = {**self._params, "batch": batch, "context": self._context, "graph": self._rank.mode.captures}
        self._experts(step, params)
        replay, finite = self._prepared(step)
        rounds = self._options.sizes.rounds if self._rank.mode.captures else _EAGER_ROUNDS
        times = self._rank.slowest(replay, rounds=rounds)
        roof = best_step(self._config, batch=batch, context=self._context, world=self._rank.parallel.sizes.world)
        value, serial = device_clock.median(times), roof.serial * 1e3
        share = round(serial / value, 4)
        self._add("two_decode.step", round(value, 4), "ms", params=params, roof=round(serial, 4), share=share)
        self._add("two_decode.spread", [round(times[0], 4), round(times[-1], 4)], "ms", params=params)
        self._add("two_decode.finite", all(self._rank.all(finite())), "bool", params=params)

    def _prepared(self, step: DecodeStep) -> tuple[Callable[[], None], Callable[[], bool]]:
        """What is timed, a replay where a graph can hold the step, and whether its logits are finite."""
        if self._rank.mode.captures:
            replay, out = step.capture()
            return replay, lambda: bool(out.isfinite().all())

        def eager() -> None:
            step.logits()

        return eager, lambda: bool(step.logits().isfinite().all())

    def _experts(self, step: DecodeStep, params: dict[str, Any]) -> None:
        """Distinct experts of the whole machine, by layer: each rank sees all rows unless they are sent."""
        met = distinct_experts(self._model, step.logits)
        rows = params["batch"] if self._rank.mode.captures else step.batch.num_requests
        roof = expected_experts(self._config, rows)
        self._add("two_decode.experts", met, "distinct experts a layer", params={**params, "rows": rows}, roof=roof)

    def _trace(self, batch: int) -> None:
        """Where a replay goes on rank 0, by kernel. The ranks begin it together; that exchange is of float32."""
        replay, _ = self._prepared(self._placed(batch))

        def run() -> None:
            self._rank.meet()
            replay()

        run()
        found = device_clock.kernels_of(run)
        shown = {kernel: found[kernel] for kernel in list(found)[:_KERNELS_SHOWN]}
        params = {**self._params, "batch": batch, "context": self._context}
        self._add("two_decode.trace", shown, "us and launches", params=params)
        self._add("two_decode.launches", sum(count for _, count in found.values()), "launches", params=params)


def _config(options: argparse.Namespace) -> DeepseekV4Config:
    """The whole model, or as many layers as asked for; to compile, a layer of each kind."""
    sizes = options.sizes
    whole: DeepseekV4Config = sizes.two_model if options.tiny else getattr(sizes, options.preset).without_draft()
    if options.warm:
        kinds = tuple(dict.fromkeys(whole.main_ratios))
        return whole.replace(num_hidden_layers=len(kinds), compress_ratios=kinds, num_hash_layers=1)
    return first_layers(whole, options.layers) if options.layers else whole
