"""Part of a GPU session: from the start of a process to the first token, and where the time goes.

The model has as many full-width layers as fit, with weights that are made on the device. A process of its own measures
itself; the time before its first line is what is left of the time that the parent saw.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows
    from halocline.engine.engine import Engine
    from halocline.hal.backend import Backend
    from halocline.models.interface import CausalModel

__all__ = ["child", "start"]

_PROMPT, _POSITIONS, _STEP_TOKENS, _REQUESTS = 256, 4096, 2048, 32
_CACHE_BYTES = 2**30  # a request of the longest context, and graphs of all sizes, for as many layers as fit
_MARK = "start: "

_Taken = TypeVar("_Taken")
_Given = TypeVar("_Given")


def start(rows: Rows, options: argparse.Namespace) -> None:
    """Starts a process that makes a model and an engine and generates, with the kernel caches as they are."""
    for name in options.sets:
        params = {"kernels": name, "caches": options.caches}
        with rows.guard("start", **params):
            command = [sys.executable, "-m", "halocline.benchmarks", "gpu_parts", "start_child"]
            command += ["--out", str(options.out), "--sets", name, *(["--tiny"] if options.tiny else [])]
            command += ["--layers", str(options.layers)] if options.layers else []
            begun = time.time()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), "")
            if not line:
                raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr[-1500:]}")
            found = json.loads(line.removeprefix(_MARK))
            seconds = {"start of Python": round(found.pop("begun") - begun, 2), **found.pop("seconds")}
            params |= found
            rows.add("start.where", seconds, "s", params=params)
            rows.add("start.first_token", round(sum(seconds.values()), 2), "s", params=params)


class _Laps:
    """Seconds of one thing after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends what is called so; what was measured apart within it does not count."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 2)
        self._last = now

    def around(self, name: str, function: Callable[[_Taken], _Given]) -> Callable[[_Taken], _Given]:
        """The function, whose calls are measured apart from what they are part of."""

        def timed(argument: _Taken) -> _Given:
            begun = time.perf_counter()
            found = function(argument)
            seconds = time.perf_counter() - begun
            self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 2)
            self._last += seconds
            return found

        return timed


def child(_rows: Rows, options: argparse.Namespace) -> None:
    """Runs in the process that is measured; prints one line."""
    begun, laps = time.time(), _Laps()
    import torch

    on_gpu = torch.cuda.is_available()
    laps.lap("import torch")
    if on_gpu:
        torch.zeros(1, device="cuda")
    laps.lap("device context")
    from halocline.engine.admission import admit
    from halocline.engine.request import Request
    from halocline.engine.sampling_params import SamplingParams

    left = _Left()
    engine, layers = _engine(options, laps)
    prompt = torch.randint(4, 500, (_PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    admitted = admit(prompt, SamplingParams(temperature=0.0, max_tokens=1), engine.limits)
    request = Request("first", admitted, arrival_time=time.monotonic())
    engine.add(request)
    engine.run()
    laps.lap("first token")
    if request.error is not None:
        raise RuntimeError(request.error)
    held, most = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if on_gpu else (0, 0)
    facts = {
        "begun": begun,
        "seconds": laps.seconds,
        "layers": layers,
        "prompt": _PROMPT,
        "GiB": round(held / 2**30, 1),
        "most GiB": round(most / 2**30, 1),
        "left": left.said,
    }
    sys.stdout.write(_MARK + json.dumps(facts) + "\n")
    sys.stdout.flush()


class _Left(logging.Handler):
    """What was not compiled side by side, as the engine's log says it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []
        for name in ("halocline.backends_triton.runtime", "halocline.kernels_portable.build"):
            logger = logging.getLogger(name)
            logger.setLevel(logging.DEBUG)
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the beginning of a line, unless it says that something was compiled."""
        if ": compiled in" not in record.getMessage():
            self.said.append(record.getMessage()[:200])


def _engine(options: argparse.Namespace, laps: _Laps) -> tuple[Engine, int]:
    """An engine that is ready, and how many layers its model has."""
    from halocline.benchmarks import device_clock
    from halocline.benchmarks.decode_step import random_model
    from halocline.benchmarks.gpu_engine import kernel_flags
    from halocline.engine.config import EngineConfig
    from halocline.engine.engine import Engine
    from halocline.engine.sampler import Sampler
    from halocline.engine.warm_up import kernel_builder, warm_up_tokens
    from halocline.hal.backend import load_backend, load_manifests
    from halocline.hal.runtime import load_ops
    from halocline.models.deepseek_v4.presets import first_layers

    laps.lap("import the engine")
    layers = options.layers or options.sizes.deep_layers
    network, table = random_model(
        first_layers(options.sizes.flash, layers), kernel_flags(options.sets[0]), max_positions=_POSITIONS
    )
    device_clock.settle()
    device_clock.release()
    laps.lap("kernels and weights")
    for library in sorted(table.libraries):  # they would be imported when they are called first
        importlib.import_module(library)
    laps.lap("import kernel libraries")
    model: CausalModel = cast("CausalModel", network)
    config = EngineConfig(
        cache_bytes=_CACHE_BYTES if table.device.is_gpu else 2**27,
        max_requests=_REQUESTS,
        max_positions=_POSITIONS,
        max_step_tokens=_STEP_TOKENS,
        graph_sizes=options.sizes.graph_sizes,
        warm_up_tokens=warm_up_tokens(_STEP_TOKENS, compiles=table.device.is_gpu),
    )
    sampler = Sampler(config.max_requests, model.vocab_size, load_ops(table), network.device)
    backend = load_backend(load_manifests(), table.device.vendor)
    build = kernel_builder(table, backend)
    if build is not None:
        build = laps.around("compiling side by side", build)
    sampler.warm_up(build)
    laps.lap("sampling")
    engine = Engine(
        model,
        sampler,
        config,
        device=network.device,
        capture=None if backend is None else _TimedCapture(backend, laps),
        build=build,
    )
    laps.lap("caches and warm-up")
    return engine, layers


class _TimedCapture:
    """A backend's graphs, recorded apart from what is measured around them."""

    def __init__(self, backend: Backend, laps: _Laps) -> None:
        self._capture = laps.around("graphs", backend.capture)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `halocline.hal.backend.Backend`."""
        return self._capture(run)
