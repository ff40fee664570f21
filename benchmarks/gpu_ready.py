"""Parts of a GPU session about a running engine: it is ready when it says so, and takes every override and preset."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from halocline.benchmarks.gpu_engine import PORTABLE, kernel_flags, load_model
from halocline.benchmarks.gpu_parity import add_left_out, is_asked, prompts
from halocline.benchmarks.jit_watch import JitWatch, cache_folders
from halocline.cli.compare import workbench
from halocline.hal.ops import all_ops
from halocline.hal.settings import process_settings
from halocline.hal.stages import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from halocline.benchmarks.gpu_engine import GpuModel
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["explained", "made", "overrides", "ready"]


def ready(rows: Rows, options: argparse.Namespace) -> None:
    """Prompts of three lengths and many batch sizes on a ready engine, with empty caches of compiled kernels before."""
    for name in options.sets:
        with rows.guard("ready", kernels=name):
            _ready(rows, options, name)


def _ready(rows: Rows, options: argparse.Namespace, name: str) -> None:
    sizes = options.sizes
    model = load_model(
        options.model,
        kernel_flags(name),
        graph_sizes=tuple(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= max(sizes.ready_batches)),
        max_requests=max(sizes.ready_batches),
        max_positions=max(sizes.ready_lengths) + 64,
        max_step_tokens=128 if options.tiny else 2048,
        warms_up=True,
    )
    params = {"kernels": name, "lengths": list(sizes.ready_lengths), "batches": list(sizes.ready_batches)}
    rows.add("ready.warm_up", round(model.engine.warm_up_seconds, 2), "s", params=params)
    watch = JitWatch(cache_folders(process_settings()))
    _serve(model, sizes.ready_lengths, sizes.ready_batches)
    watch.close()
    found = {"kernels": watch.kernels(), "modules": watch.modules(), "programs": watch.compilers()}
    for what, names in found.items():
        said = {"said": _counted(watch.programs())} if what == "programs" else {}
        rows.add(f"ready.{what}", len(names), what, params={**params, "first": _counted(names), **said})


def _counted(names: Iterable[str]) -> list[str]:
    """Every name with how often it occurs, the most frequent first."""
    return [f"{name} x {count}" for name, count in Counter(names).most_common()]


def _serve(model: GpuModel, lengths: tuple[int, ...], batches: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(11)
    for length in lengths:
        prompt = torch.randint(4, 500, (length,), generator=generator).tolist()
        model.generate([prompt], max_tokens=4)
    for batch in batches:
        found = [
            torch.randint(4, 500, (lengths[0] + index % 5,), generator=generator).tolist() for index in range(batch)
        ]
        model.generate(found, max_tokens=4)


# ---- overrides ------------------------------------------------------------------------------------------------------


def overrides(rows: Rows, options: argparse.Namespace) -> None:
    """A short generation for each op and each of its kernels that can run here, the reference among them."""
    bench = workbench()
    base = PORTABLE if bench.device.is_gpu else ()
    expected = _short(options, base)
    served = {row["op"] for row in load_model(options.model, base, max_requests=4).table.rows()}
    add_left_out(rows, bench, options, "override.left_out")
    for op in all_ops():
        if not is_asked(op, options):
            continue
        for spec in bench.candidates(op.name):
            if op.name not in served or spec.vendor not in ("", bench.device.vendor) or bench.against(spec):
                continue
            params = {"op": op.name, "kernel": spec.name, "is_reference": spec.name == REFERENCE}
            with rows.guard("override", **params):
                found = _short(options, (*base, f"{op.name}={spec.name}"))
                equal = sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)
                rows.add("override.ran", equal, "share of equal answers", params=params)


def _short(options: argparse.Namespace, flags: tuple[str, ...]) -> list[list[int]]:
    model = load_model(options.model, flags, max_requests=4, max_positions=1024, max_step_tokens=512)
    return model.generate(prompts()[:2], max_tokens=4)


def made(rows: Rows, options: argparse.Namespace) -> None:
    """`halocline make-model --on-device` writes a released model's first layers, which then load and generate."""
    preset, layers = ("vendor-tiny", 3) if options.tiny else (options.preset, options.layers or 2)
    params = {"preset": preset, "layers": layers}
    with rows.guard("made", **params), TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        command = [sys.executable, "-m", "halocline", "make-model", str(folder), "--on-device", "--preset", preset]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, "--layers", str(layers)], capture_output=True, text=True, check=False, timeout=300
        )
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise RuntimeError(f"make-model ended with {done.returncode}: {done.stderr[-500:]}")
        rows.add("made.seconds_in_all", round(seconds, 1), "s", params={**params, "said": done.stdout[-200:]})
        start = time.perf_counter()
        model = load_model(folder, kernel_flags("default"), max_requests=2, max_positions=1024, max_step_tokens=512)
        rows.add("made.loaded", round(time.perf_counter() - start, 1), "s", params=params)
        found = model.generate(prompts()[:2], max_tokens=4)
        rows.add("made.generated", [len(ids) for ids in found], "tokens", params=params)


def explained(rows: Rows, _options: argparse.Namespace) -> None:
    """What `halocline explain` and `halocline doctor` say on this machine."""
    with rows.guard("explain"):
        command = [sys.executable, "-m", "halocline", "explain", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"explain ended with {done.returncode}: {done.stderr[-500:]}")
        found = json.loads(done.stdout)
        bound = {row["op"]: row["chosen"] for row in found["ops"]}
        planned = [row["op"] for row in found["ops"] if row["status"] == "planned"]
        unbound = [op for op, kernel in bound.items() if not kernel]
        rows.add("explain.bound", bound, "kernels", params={"unbound": unbound, "planned": planned})
    with rows.guard("doctor"):
        command = [sys.executable, "-m", "halocline", "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        rows.add("doctor.status", done.returncode, "exit status", params={"said": done.stdout[-1500:]})
