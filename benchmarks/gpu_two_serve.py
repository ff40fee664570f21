"""Parts of a GPU session on two ranks: the product itself, from writing a whole model to the drain of a server."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.benchmarks.gpu_models import model_folder, preset_name, write_model
from halocline.benchmarks.gpu_progress import run_and_show, telling_of_kernels
from halocline.benchmarks.gpu_server import ask, end, served, wait_and_tell
from halocline.models.deepseek_v4.presets import preset

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["two_generate", "two_make", "two_serve"]

_NAME = "halocline-two"
_WORKERS = 8  # a worker holds a file of the model twice
_CONTEXT = 16384
_CACHES, _SMALL_CACHES = 4 << 30, 64 << 20
_TOKENS, _TINY_TOKENS = 32, 6
_FEW_LAYERS = 4  # one of each kind, and experts that are chosen by hash and by score


# ---- the model ------------------------------------------------------------------------------------------------------


def two_make(rows: Rows, options: argparse.Namespace) -> None:
    """`halocline make-model --on-device --workers N`: the whole depth, or as many layers as there is room for."""
    name = preset_name(options)
    with rows.guard("two_make"):
        layers = options.layers or preset(name).num_hidden_layers
        workers = 2 if options.tiny else _WORKERS
        write_model(rows, options, model_folder(options, _NAME), layers, workers=workers, part="two_make")


# ---- generate -------------------------------------------------------------------------------------------------------


def two_generate(rows: Rows, options: argparse.Namespace) -> None:
    """`halocline generate --gpus 2` on the model of `two_make`: starts its ranks, answers, ends."""
    folder = model_folder(options, _NAME)
    with rows.guard("two_generate"):
        layers = _layers_of(folder)
        command = [sys.executable, "-m", "halocline", "generate", "--model", str(folder), "--gpus", "2", "--json"]
        command += ["--prompt-ids", "0 " + " ".join(str(4 + i % 200) for i in range(300)), "--temperature", "0"]
        command += ["--max-new-tokens", str(_tokens(options)), "--max-context", str(_context(options))]
        command += ["--cache-bytes", str(_SMALL_CACHES if options.tiny else _CACHES)]
        begun = time.monotonic()
        with telling_of_kernels():
            done = run_and_show(command)
        if done.returncode != 0:
            raise RuntimeError(f"generate ended with {done.returncode}: {done.stderr[-900:]}")
        found, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])  # libraries may print, too
        count = len(found["outputs"][0]["token_ids"])
        params = {"layers": layers, "said": done.stderr[-300:]}
        rows.add("two_generate.seconds_in_all", round(time.monotonic() - begun, 1), "s", params=params)
        rows.add("two_generate.tokens", count, "tokens", params={"layers": layers, "asked": _tokens(options)})


def _layers_of(folder: Path) -> int:
    config = folder / "config.json"
    if not config.is_file():
        raise RuntimeError(f"there is no model in {folder}: the part two-make writes it")
    layers: int = json.loads(config.read_text())["num_hidden_layers"]
    return layers


def _tokens(options: argparse.Namespace) -> int:
    return _TINY_TOKENS if options.tiny else _TOKENS


def _context(options: argparse.Namespace) -> int:
    return 1024 if options.tiny else _CONTEXT


# ---- serve ----------------------------------------------------------------------------------------------------------


def two_serve(rows: Rows, options: argparse.Namespace) -> None:
    """`halocline serve --gpus 2` on the model of `two_make`: ready, answers alone and together, drain, nobody left.

    `--warm` serves a few layers of its own writing instead, so that all kernels of this start are compiled.
    """
    if options.warm:
        with rows.guard("two_warm_serve"):
            _warm(rows, options)
        return
    folder = model_folder(options, _NAME)
    with rows.guard("two_serve"):
        layers = _layers_of(folder)
        params: dict[str, Any] = {"layers": layers}
        context = ["--max-context", str(_context(options))]
        with telling_of_kernels(), served(folder, context, gpus=2) as server:
            wait_and_tell(rows, server, params, part="two_serve")
            ask(rows, server, params, _tokens(options), part="two_serve")
            end(rows, server, params, part="two_serve")


def _warm(rows: Rows, options: argparse.Namespace) -> None:
    """Starts a server as `two_serve` does, but for the depth and small caches, and ends it once it has answered."""
    folder = model_folder(options, "halocline-two-few")
    layers = min(_FEW_LAYERS, preset(preset_name(options)).num_hidden_layers)
    params = {"layers": layers}
    caches = _SMALL_CACHES if options.tiny else _CACHES
    more = ["--max-context", str(_context(options)), "--cache-bytes", str(caches)]
    try:
        write_model(rows, options, folder, layers, workers=2, part="two_warm_make")
        with telling_of_kernels(), served(folder, more, gpus=2) as server:
            wait_and_tell(rows, server, params, part="two_warm_serve")
            server.complete("halocline: fresh above, salt below. " * 8, tokens=4)
            server.drain()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
