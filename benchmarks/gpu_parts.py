"""One part of a GPU session, in a process of its own: `gpu_session` starts them, a person may."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from halocline.benchmarks.gpu_ranks import MODES
from halocline.benchmarks.gpu_rows import Rows
from halocline.benchmarks.gpu_sizes import FULL, KERNEL_SETS, TINY

__all__ = ["MODULES", "main", "parse"]

# Where each part is. A module is imported by the processes that run a part of it.
MODULES = {
    "cases": "gpu_parity",
    "generation": "gpu_parity",
    "smallest": "gpu_parity",
    "speed": "gpu_parity",
    "graded": "gpu_graded",
    "width": "gpu_width",
    "graphs": "gpu_graphs",
    "decode": "gpu_decode",
    "peer": "gpu_peer",
    "ready": "gpu_ready",
    "overrides": "gpu_ready",
    "explained": "gpu_ready",
    "made": "gpu_ready",
    "start": "gpu_start",
    "start_child": "gpu_start",
    "serve": "gpu_serve",
    "sanitizer": "gpu_tools",
    "tests": "gpu_tools",
    "wheel": "gpu_tools",
    "two_smoke": "gpu_two",
    "two_collectives": "gpu_two",
    "two_decode": "gpu_two_decode",
    "two_graded": "gpu_two_engine",
    "two_make": "gpu_two_serve",
    "two_generate": "gpu_two_serve",
    "two_serve": "gpu_two_serve",
}
_FUNCTIONS = {"start_child": "child"}
_ENDED = 128 + signal.SIGTERM


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads a part's command line; `sizes` are added, and `arguments`, what was read."""
    parser = argparse.ArgumentParser(prog="./dev bench gpu_parts", description=__doc__)
    parser.add_argument("part", choices=MODULES)
    parser.add_argument("--out", type=Path, required=True, help="folder of everything else, and of the rows")
    parser.add_argument("--rows", type=Path, help="file of the rows, if not in that folder")
    parser.add_argument("--label", default="", help="name of the part in its rows")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows on a CPU that a part runs")
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of the graded model")
    parser.add_argument("--prompts", type=Path, default=Path(".whl/prompts.json"), help="from gpu_prompts")
    parser.add_argument("--wheels", type=Path, nargs="+", default=[], help="folders of archives and wheels")
    parser.add_argument("--sets", nargs="+", choices=KERNEL_SETS, default=["default"], help="kernel sets")
    parser.add_argument("--ops", nargs="*", default=[], metavar="OP", help="ops or families; all when left out")
    parser.add_argument("--kernels", nargs="*", default=[], metavar="NAME", help="kernels; all when left out")
    parser.add_argument("--preset", choices=("flash", "pro"), default="flash", help="model of decode")
    parser.add_argument("--layers", type=int, help="layers of decode and start")
    parser.add_argument("--shapes", nargs="*", default=[], help="batch sizes of decode, and `prefill`, in this order")
    parser.add_argument("--warm", action="store_true", help="run each shape once to compile it; time nothing")
    parser.add_argument("--trace", action="store_true", help="list the kernels of timed steps, too")
    parser.add_argument("--batches", nargs="+", type=int, default=[32], help="requests at a time, of graded")
    parser.add_argument("--items", type=int, default=0, help="exercises of graded; all when 0")
    parser.add_argument("--eager", action="store_true", help="graded without graphs")
    parser.add_argument("--caches", default="warm", help="how the kernel caches are, in the rows of start")
    parser.add_argument("--tool", default="memcheck", help="of compute-sanitizer")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=[], help="ways to spread a model over two ranks")
    parser.add_argument("--folder", type=Path, help="in which models are written that are served; else in main memory")
    parser.add_argument("--tests", nargs="*", default=[], metavar="PYTEST", help="handed to pytest")
    options = parser.parse_args(list(arguments))
    options.sizes = TINY if options.tiny else FULL
    options.arguments = list(arguments)
    return options


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(_ENDED)


def main(arguments: Sequence[str]) -> int:
    """Runs one part; 1 if something in it failed."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _end)  # a part that is ended early still says what it has found
    options.out.mkdir(parents=True, exist_ok=True)
    module = import_module(f"halocline.benchmarks.{MODULES[options.part]}")
    part: Callable[[Rows, argparse.Namespace], None] = getattr(module, _FUNCTIONS.get(options.part, options.part))
    if options.part == "start_child":  # it measures its own imports: rows would load torch before
        part(None, options)  # type: ignore[arg-type]
        return 0
    label = options.label or options.part
    rows = Rows(options.rows or options.out / "rows.jsonl", part=label, commit=options.commit)
    part(rows, options)
    return int(rows.failures > 0)
