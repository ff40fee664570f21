"""Parts of a GPU session on two ranks: whether exchanges work at all, and what they take inside a graph."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from halocline.benchmarks import device_clock
from halocline.benchmarks.gpu_engine import kernel_flags
from halocline.benchmarks.gpu_ranks import Rank, in_modes, is_rank
from halocline.hal.backend import load_manifests
from halocline.hal.probe import probe
from halocline.hal.settings import process_settings, set_library_variable

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.benchmarks.gpu_rows import Rows
    from halocline.hal.ops.collective import ProcessGroup

    Call = Callable[[Tensor], Tensor]

__all__ = ["two_collectives", "two_smoke"]

_CALLS = 64  # of one exchange in a graph
_LANES = 4096
_BYTES = (8 << 10, 256 << 10, 1 << 20)  # a row of bfloat16, and those of 32 and of 128 requests


# ---- whether they work ----------------------------------------------------------------------------------------------


def two_smoke(rows: Rows, options: argparse.Namespace) -> None:
    """Values of every exchange, eager and replayed; a small random model, eager and replayed; then all leave."""

    def work(rank: Rank) -> None:
        rank.add(rows, "two_smoke.joined", rank.start, "s", params={"mode": rank.name})
        if rank.device != "cpu":
            reaches = torch.cuda.can_device_access_peer(rank.parallel.rank, 1 - rank.parallel.rank)
            rank.add(rows, "two_smoke.peer_access", reaches, "bool", params={"mode": rank.name})
        _exchanged(rows, rank)
        _model(rows, rank, options)

    if is_rank():
        set_library_variable("NCCL_DEBUG", "INFO")  # how the devices are linked, into the part's log
    in_modes(rows, options, options.modes or options.sizes.two_modes, work)


def _exchanged(rows: Rows, rank: Rank) -> None:
    """Compares every exchange with its sum or its order, worked out by hand."""
    own = rank.parallel.rank
    x_TD = torch.full((2, 8), float(own + 1), dtype=torch.bfloat16, device=rank.device)
    for op, kernel, run in _kernels():
        calls = _calls(op, run, rank.parallel.world, x_TD)
        right = [bool(torch.equal(call(x_TD.clone()), expected)) for call, expected in calls]
        replayed = (
            [] if op == "collective.all_to_all" else [_replayed(call, x_TD, expected) for call, expected in calls]
        )
        found = {"eager": rank.all(right), "replayed": rank.all(replayed)}
        params = {"mode": rank.name, "op": op, "kernel": kernel}
        rank.add(rows, "two_smoke.exchange", found, "right on each rank", params=params)
        if not all(map(all, (*found["eager"], *found["replayed"]))):
            raise RuntimeError(f"{op}={kernel} gives wrong values: {found}")


def _calls(op: str, run: Callable[..., Tensor], group: ProcessGroup, x_TD: Tensor) -> list[tuple[Call, Tensor]]:
    """Calls of an exchange between ranks that hold ones and twos, with what must come out."""
    one, two = torch.full_like(x_TD, 1.0), torch.full_like(x_TD, 2.0)
    if op == "collective.all_reduce":
        return [(partial(run, group=group), one + two)]
    if op == "collective.all_gather":
        rows, lanes = torch.cat((one, two)), torch.cat((one, two), dim=-1)
        return [(partial(run, group=group, axis=0), rows), (partial(run, group=group, axis=-1), lanes)]
    if op == "collective.broadcast":
        return [(partial(run, group=group, source=1), two)]
    halves = [1, 1]
    return [(partial(run, send_counts=halves, receive_counts=halves, group=group), torch.cat((one[:1], two[:1])))]


def _replayed(call: Callable[[Tensor], Tensor], x_TD: Tensor, expected: Tensor) -> bool:
    """Whether a replay gives the expected values for what lies in its input then."""
    given, out = torch.zeros_like(x_TD), torch.zeros_like(expected)

    def run() -> None:
        out.copy_(call(given.clone()))

    replay = device_clock.capture(run)
    given.copy_(x_TD)
    replay()
    device_clock.settle()
    return bool(torch.equal(out, expected))


def _kernels() -> Iterator[tuple[str, str, Callable[..., Tensor]]]:
    """Every exchange that there is for this machine's vendor: op, kernel, function."""
    vendor = probe(process_settings()).vendor
    for manifest in load_manifests():
        for spec in manifest.specs:
            if spec.op.startswith("collective.") and spec.vendor == ("" if vendor == "cpu" else vendor):
                module, _, function = spec.target.partition(":")
                yield spec.op, spec.name, getattr(import_module(module), function)


def _model(rows: Rows, rank: Rank, options: argparse.Namespace) -> None:
    """A narrow model with every kind of layer: a replay gives the bits of the eager step, equal on ranks alike."""
    from halocline.benchmarks.decode_step import DecodeStep, random_model

    model, table = random_model(
        options.sizes.two_model, kernel_flags(options.sets[0]), max_positions=1024, parallel=rank.parallel
    )
    step = DecodeStep(model, batch=2, max_positions=1024, seed=1 + rank.parallel.dp_index)
    step.place([700, 130])
    eager = step.logits().clone()
    params = {"mode": rank.name, "kernels": options.sets[0]}
    if rank.mode.captures:
        replay, out = step.capture()
        replay()
        device_clock.settle()
        same = rank.all(bool(torch.equal(out, eager)))
        rank.add(rows, "two_smoke.replay", all(same), "bits of the eager step", params=params)
    finite = rank.all(bool(eager.isfinite().all()))
    rank.add(rows, "two_smoke.finite", all(finite), "bool", params={**params, "table": table.summary()})
    sums = rank.all(eager.double().sum().item())
    alike = rank.parallel.sizes.dp > 1 or len(set(sums)) == 1
    rank.add(rows, "two_smoke.alike", alike, "equal logits on ranks of one group", params={**params, "said": sums})
    if not (all(finite) and alike):
        raise RuntimeError(f"mode {rank.name}: finite {finite}, sums of logits {sums}")


# ---- what they take -------------------------------------------------------------------------------------------------


def two_collectives(rows: Rows, options: argparse.Namespace) -> None:
    """Microseconds of exchanges of three sizes: many in one replayed graph; those that none can hold, eagerly."""
    counts = (4, 2) if options.tiny else (_CALLS, options.sizes.rounds)

    def work(rank: Rank) -> None:
        for op, kernel, run in _kernels():
            for size in _BYTES:
                params = {"op": op, "kernel": kernel, "bytes": size, "graph": op != "collective.all_to_all"}
                rank.add(rows, "two.collective", *_timed(rank, op, run, size, *counts), params=params)
        if rank.device != "cpu":
            _symmetric(rows, rank, *counts)

    in_modes(rows, options, options.modes or ("tp",), work)


def _timed(rank: Rank, op: str, run: Callable[..., Any], size: int, calls: int, rounds: int) -> tuple[float, str]:
    """Microseconds of one of many exchanges, on the slower rank."""
    group, count = rank.parallel.world, size // (2 * _LANES)
    x_TD = torch.zeros((count, _LANES), dtype=torch.bfloat16, device=rank.device)
    if op == "collective.all_to_all":  # half of the rows for each rank; one row goes to both
        x_TD = torch.zeros((max(count, 2), _LANES), dtype=torch.bfloat16, device=rank.device)
        halves = [x_TD.shape[0] // 2] * 2
        return _each(rank, lambda: run(x_TD, halves, halves, group), calls, rounds, graph=False)
    more = {"axis": 0} if op == "collective.all_gather" else {}
    return _each(rank, lambda: run(x_TD, group, **more), calls, rounds, graph=True)


def _each(rank: Rank, call: Callable[[], object], calls: int, rounds: int, *, graph: bool) -> tuple[float, str]:
    def run() -> None:
        for _ in range(calls):
            call()

    times = rank.slowest(device_clock.capture(run) if graph else run, rounds=rounds)
    return round(device_clock.median(times) * 1e3 / calls, 2), "us"


def _symmetric(rows: Rows, rank: Rank, calls: int, rounds: int) -> None:
    """Sums of torch through memory that both devices see, without multicast: what a kernel of our own could reach."""
    from torch.distributed import _symmetric_memory as symmetric

    handle = rank.parallel.world.handle
    assert handle is not None
    name = handle.group_name
    for size in _BYTES[:2] if calls < _CALLS else _BYTES:
        shared = symmetric.empty(size // 2, dtype=torch.bfloat16, device=torch.device(rank.device))
        symmetric.rendezvous(shared, name)
        shared.fill_(float(rank.parallel.rank + 1))
        device_clock.settle()
        rank.all(None)
        mine = (shared, "sum", name)
        for kernel in ("one_shot_all_reduce", "two_shot_all_reduce_"):
            function = getattr(torch.ops.symm_mem, kernel)
            if kernel == "one_shot_all_reduce":
                found = bool((function(*mine) == 3).all())
                if not all(rank.all(found)):
                    raise RuntimeError(f"{kernel} of {size} bytes gives wrong sums")
            params = {"op": "collective.all_reduce", "kernel": f"symm_mem.{kernel}", "bytes": size, "graph": True}
            value = _each(rank, partial(function, *mine), calls, rounds, graph=True)
            rank.add(rows, "two.collective", *value, params=params)
