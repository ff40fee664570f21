"""Part of a GPU session: the product on one device, from writing a model to the drain of its server under load.

The model has full-width layers in the release's formats, as many as main memory holds beside everything else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.benchmarks.gpu_models import model_folder, write_model
from halocline.benchmarks.gpu_progress import telling_of_kernels
from halocline.benchmarks.gpu_server import Server, ask, end, served, wait_and_tell

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["serve"]

_LAYERS, _TINY_LAYERS = 16, 4
_WORKERS, _TINY_WORKERS = 8, 2
_CONTEXT, _TINY_CONTEXT = 8192, 1024
_CACHES, _TINY_CACHES = 8 << 30, 64 << 20
_TOKENS, _TINY_TOKENS = 64, 6
_LOAD = ("--concurrency", "1,8,32", "--requests", "32", "--input-tokens", "1024", "--output-tokens", "128")
_TINY_LOAD = ("--concurrency", "2", "--requests", "3", "--input-tokens", "20", "--output-tokens", "3", "--warmup", "1")
_METRICS = ("request_throughput", "output_token_throughput", "time_to_first_token", "inter_token_latency")


def serve(rows: Rows, options: argparse.Namespace) -> None:
    """`make-model`, `serve`, completions alone and together, `bench serve`, and the server's end; nobody is left."""
    tiny, folder = options.tiny, model_folder(options, "halocline-one")
    asked = options.layers or (_TINY_LAYERS if tiny else _LAYERS)
    workers = _TINY_WORKERS if tiny else _WORKERS
    more = ["--max-context", str(_TINY_CONTEXT if tiny else _CONTEXT)]
    more += ["--cache-bytes", str(_TINY_CACHES if tiny else _CACHES)]
    with rows.guard("serve"):
        try:
            params = {"layers": write_model(rows, options, folder, asked, workers=workers, part="serve_make")}
            with telling_of_kernels(), served(folder, more, gpus=1) as server:
                wait_and_tell(rows, server, params, part="serve")
                ask(rows, server, params, _TINY_TOKENS if tiny else _TOKENS, part="serve")
                _load(rows, server, params, options.out / "bench-serve.json", _TINY_LOAD if tiny else _LOAD)
                end(rows, server, params, part="serve")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _load(rows: Rows, server: Server, params: dict[str, Any], report: Path, words: tuple[str, ...]) -> None:
    """What `halocline bench serve` measures, level by level."""
    command = [sys.executable, "-m", "halocline", "bench", "serve", "--url", server.url, "--json", str(report), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"bench serve ended with {done.returncode}: {done.stderr[-900:]}")
    asked = dict(zip(words[::2], words[1::2], strict=True))
    lengths = {"input": int(asked["--input-tokens"]), "output": int(asked["--output-tokens"])}
    for level in json.loads(report.read_text())["levels"]:
        figures = {name: _figures(level["metrics"][name]) for name in _METRICS}
        rows.add("serve.load", figures, "as named", params={**params, **lengths, "at_once": level["concurrency"]})


def _figures(metric: dict[str, Any]) -> dict[str, Any]:
    kept = {kind: metric[kind] for kind in ("unit", "avg", "p50", "p99") if kind in metric}
    return {kind: round(value, 2) if isinstance(value, float) else value for kind, value in kept.items()}
