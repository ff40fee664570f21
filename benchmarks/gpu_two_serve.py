"""Parts of a GPU session on two ranks: the product itself, from writing a whole model to the drain of a server.

No disk of the machine holds the whole model; its main memory does. A machine whose memory grows as it is used must not
be filled faster than it grows, so that all writers but one stand still while little is free.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.benchmarks.gpu_progress import run_and_show, telling_of_kernels
from halocline.benchmarks.gpu_server import Server, family_of
from halocline.benchmarks.roofline import totals
from halocline.models.deepseek_v4.presets import first_layers, preset

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["ask", "end", "folder_of", "served", "two_generate", "two_make", "two_serve", "write_model"]

_SHARDS, _WORKERS = 96, 8  # a worker holds a file of the model twice
_SPARE = 8 << 30  # in a file system, beside the model
_MOUNT = 224 << 30  # size of the file system in memory; the same for all who ask, as one must not undo another's
_LEAST_FREE = 8 << 30  # of main memory, while several writers run
_LOOK_SECONDS = 0.05
_CONTEXT = 16384
_CACHES, _SMALL_CACHES = 4 << 30, 64 << 20
_TOKENS, _TINY_TOKENS = 32, 6
_FEW_LAYERS = 4  # one of each kind, and experts that are chosen by hash and by score


def folder_of(options: argparse.Namespace) -> Path:
    """Where the model is: as asked for, else in main memory."""
    folder: Path | None = options.folder
    return folder or (options.out if options.tiny else Path("/dev/shm")) / "halocline-two"


# ---- the model ------------------------------------------------------------------------------------------------------


def two_make(rows: Rows, options: argparse.Namespace) -> None:
    """`halocline make-model --on-device --workers N`: the whole depth, or as many layers as there is room for."""
    name = _preset(options)
    with rows.guard("two_make"):
        layers = options.layers or preset(name).num_hidden_layers
        write_model(rows, options, folder_of(options), layers, workers=2 if options.tiny else _WORKERS)


def _preset(options: argparse.Namespace) -> str:
    return "vendor-tiny" if options.tiny else str(options.preset)


def write_model(
    rows: Rows, options: argparse.Namespace, folder: Path, asked: int, *, workers: int, part: str = "two_make"
) -> int:
    """Has `halocline make-model` write a model; returns its layers, fewer than asked for where there is no room.

    Args:
        rows: Take `PART.seconds_in_all` and `PART.held_back`.
        options: Of the part.
        folder: Emptied before.
        asked: Layers.
        workers: Processes that write.
        part: Name in the rows.
    """
    name = _preset(options)
    shutil.rmtree(folder, ignore_errors=True)
    layers = _layers_with_room(folder.parent, name, asked)
    params = {"preset": name, "layers": layers, "asked": asked, "workers": workers}
    shards = min(_SHARDS, 12 * workers)
    command = [sys.executable, "-m", "halocline", "make-model", str(folder), "--on-device", "--preset", name]
    command += ["--layers", str(layers), "--shards", str(shards), "--workers", str(workers)]
    begun = time.monotonic()
    log = options.out / f"{folder.name}.txt"
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        held_back = _write_as_memory_grows(process)
    text = log.read_text(errors="replace")
    if process.returncode != 0:
        raise RuntimeError(f"make-model ended with {process.returncode}: {text[-900:]}")
    gigabytes = round(sum(path.stat().st_size for path in folder.iterdir()) / 1e9, 2)
    seconds = round(time.monotonic() - begun, 1)
    rows.add(f"{part}.seconds_in_all", seconds, "s", params={**params, "GB": gigabytes, "said": text[-300:]})
    rows.add(f"{part}.held_back", held_back, "s", params=params)
    return layers


def _layers_with_room(folder: Path, name: str, asked: int) -> int:
    """As many layers as asked for, or as fit when a file system in memory cannot be made large enough."""
    whole = preset(name)
    room = _room(folder, int(totals(first_layers(whole, asked)).resident_bytes) + _SPARE)
    fitting = [n for n in range(1, asked + 1) if totals(first_layers(whole, n)).resident_bytes + _SPARE <= room]
    if not fitting:
        raise RuntimeError(f"{folder} has {room / 1e9:.1f} GB free: not enough for one layer and {_SPARE / 1e9:.1f} GB")
    return fitting[-1]


def _room(folder: Path, needed: int) -> int:
    """Free bytes of a file system; one in memory is made larger if need be and if this user may."""
    free = shutil.disk_usage(folder).free
    if free < needed and folder == Path("/dev/shm"):
        size = f"size={max(_MOUNT, shutil.disk_usage(folder).used + needed) >> 20}M"
        done = subprocess.run(
            ["mount", "-o", f"remount,{size}", str(folder)], capture_output=True, text=True, check=False
        )
        sys.stdout.write(f"remount {size}: {done.returncode} {done.stderr.strip()}\n")
        free = shutil.disk_usage(folder).free
    return free


def _write_as_memory_grows(process: subprocess.Popen[bytes]) -> float:
    """Waits for a process and its workers; returns for how many seconds all workers but one stood still."""
    still = 0.0
    while process.poll() is None:
        time.sleep(_LOOK_SECONDS)
        free = _free_memory()
        if free > _LEAST_FREE:
            continue
        # The process, a helper of Python's and a worker go on. One that stands still may hold a lock that it needs:
        # after a while all go on for a moment.
        others = family_of(process.pid)[3:]
        begun, longest = time.monotonic(), 0.5 if free > _LEAST_FREE / 2 else 2.0
        _tell(others, signal.SIGSTOP)
        try:
            while process.poll() is None and time.monotonic() - begun < longest and _free_memory() < _LEAST_FREE:
                time.sleep(_LOOK_SECONDS)
        finally:
            _tell(others, signal.SIGCONT)
        still += time.monotonic() - begun
    return round(still, 1)


def _tell(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _free_memory() -> int:
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) * 1024


# ---- generate -------------------------------------------------------------------------------------------------------


def two_generate(rows: Rows, options: argparse.Namespace) -> None:
    """`halocline generate --gpus 2` on the model of `two_make`: starts its ranks, answers, ends."""
    folder = folder_of(options)
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
    folder = folder_of(options)
    with rows.guard("two_serve"):
        layers = _layers_of(folder)
        params: dict[str, Any] = {"layers": layers}
        context = ["--max-context", str(_context(options))]
        with telling_of_kernels(), served(folder, context) as server:
            table = server.wait_until_ready()
            rows.add("two_serve.ready", server.seconds_to_ready, "s", params=params)
            rows.add("two_serve.where", table, "s to each line of the log", params=params)
            ask(rows, server, params, _tokens(options))
            end(rows, server, params)


def _warm(rows: Rows, options: argparse.Namespace) -> None:
    """Starts a server as `two_serve` does, but for the depth and small caches, and ends it once it has answered."""
    folder = folder_of(options).with_name("halocline-two-few")
    layers = min(_FEW_LAYERS, preset(_preset(options)).num_hidden_layers)
    params = {"layers": layers}
    caches = _SMALL_CACHES if options.tiny else _CACHES
    more = ["--max-context", str(_context(options)), "--cache-bytes", str(caches)]
    try:
        write_model(rows, options, folder, layers, workers=2)
        with telling_of_kernels(), served(folder, more) as server:
            table = server.wait_until_ready()
            rows.add("two_warm_serve.ready", server.seconds_to_ready, "s", params=params)
            rows.add("two_warm_serve.where", table, "s to each line of the log", params=params)
            server.complete("halocline: fresh above, salt below. " * 8, tokens=4)
            server.drain()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def served(folder: Path, more: Sequence[str], *, gpus: int = 2) -> Iterator[Server]:
    """A server of the model in a folder; whatever is left of it is ended at the end."""
    command = [sys.executable, "-m", "halocline", "serve", "--model", str(folder), "--gpus", str(gpus), *more]
    server = Server(command)
    try:
        yield server
    finally:
        server.kill()


def ask(rows: Rows, server: Server, params: dict[str, Any], tokens: int, *, part: str = "two_serve") -> None:
    """Greedy completions alone and eight at a time; a first one before, which is not timed.

    Args:
        rows: Take `PART.first_token`, `PART.rate` and `PART.same`.
        server: Ready.
        params: Of the rows.
        tokens: Of each answer.
        part: Name in the rows.

    Raises:
        RuntimeError: If an answer has fewer.
    """
    prompts = [f"{number} halocline: fresh above, salt below. " * 8 for number in range(8)]
    server.complete(prompts[0], tokens=4)
    one = server.complete(prompts[0], tokens=1)
    alone = server.complete(prompts[0], tokens=tokens)
    rate = round((alone["tokens"] - 1) / max(alone["seconds"] - one["seconds"], 1e-6), 1)
    rows.add(f"{part}.first_token", one["seconds"], "s", params={**params, "at_once": 1, "tokens": one["tokens"]})
    asked = {**params, "at_once": 1, "tokens": alone["tokens"]}
    rows.add(f"{part}.rate", rate, "tokens/s after the first", params=asked)
    begun = time.monotonic()
    together = server.complete_together(prompts, tokens=tokens)
    seconds = time.monotonic() - begun
    count = sum(answer["tokens"] for answer in together)
    asked = {**params, "at_once": len(prompts), "tokens": count}
    rows.add(f"{part}.rate", round(count / seconds, 1), "tokens/s of all", params=asked)
    rows.add(f"{part}.same", together[0]["text"] == alone["text"], "bool", params={**params, "compared": 1})
    if count != len(prompts) * tokens or alone["tokens"] != tokens:
        raise RuntimeError(
            f"{count} tokens of {len(prompts)} requests, {alone['tokens']} of one; {tokens} were asked for"
        )


def end(rows: Rows, server: Server, params: dict[str, Any], *, part: str = "two_serve") -> None:
    """Drains a server and looks who is left of its processes.

    Args:
        rows: Take `PART.ended`.
        server: Nobody waits for it.
        params: Of the row.
        part: Name in the rows.

    Raises:
        RuntimeError: If it ends badly or leaves processes.
    """
    family = family_of(server.process.pid)
    ended = server.drain()
    left = [pid for pid in family if Path(f"/proc/{pid}").exists()]
    rows.add(f"{part}.ended", ended, "status and seconds", params={**params, "left": left})
    if ended["status"] != 0 or left:
        raise RuntimeError(f"the server ended with {ended['status']}, processes left: {left}")
