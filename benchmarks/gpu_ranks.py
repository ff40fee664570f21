"""Parts of a GPU session that take several ranks: how they are started, and what a rank asks of the others.

A part runs in three processes. The one that the session starts has no rank: it starts two with the same arguments, once
for each mode, and notes how they ended. In those the part finds a place and does its work; rank 0 writes the rows. A
rank that fails says so in a row of its own and ends the others, and the next mode starts afresh.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halocline.engine.ranks.launcher import launch_ranks
from halocline.hal.settings import process_settings, set_variables_of_ranks
from halocline.models.parallel import AllToAll, ParallelSizes

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows
    from halocline.engine.ranks.team import Team
    from halocline.models.parallel import Parallel

__all__ = ["MODES", "Mode", "Rank", "in_modes", "is_rank"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to spread a model over two ranks.

    Attributes:
        sizes: Over how many ranks everything is spread.
        a2a: How tokens reach their experts.
        says: In words, for tables.
    """

    sizes: ParallelSizes
    says: str
    a2a: AllToAll = "none"

    @property
    def captures(self) -> bool:
        """Whether a graph can hold a step: not where the host reads how many rows go where."""
        return self.a2a == "none"


MODES = {
    "tp": Mode(sizes=ParallelSizes(tp=2), says="heads and the width of experts over both"),
    "tp-ep": Mode(sizes=ParallelSizes(tp=2, ep=2), says="heads and whole experts over both"),
    "ep": Mode(sizes=ParallelSizes(ep=2), says="whole experts over both, attention on each"),
    "dp": Mode(sizes=ParallelSizes(dp=2, ep=2), says="requests and whole experts over both, rows gathered"),
    "dp-sent": Mode(
        sizes=ParallelSizes(dp=2, ep=2), a2a="all_to_all", says="requests and whole experts over both, rows sent"
    ),
}


def is_rank() -> bool:
    """Whether this process is one of several."""
    return process_settings().place() is not None


@dataclass(frozen=True, eq=False, kw_only=True)
class Rank:
    """One of the processes of a mode.

    Attributes:
        team: All of them.
        parallel: The place of this one, and its groups.
        device: Of this process, in torch's words.
        name: Of the mode.
        mode: It.
        start: Seconds from the process's first line of ours to here.
    """

    team: Team
    parallel: Parallel
    device: str
    name: str
    mode: Mode
    start: float

    @property
    def leads(self) -> bool:
        """Whether it writes the rows."""
        return self.team.is_leader

    def add(self, rows: Rows, name: str, value: object, unit: str, **rest: Any) -> None:
        """Writes a row, on rank 0 alone."""
        if self.leads:
            rows.add(name, value, unit, **rest)

    def meet(self) -> None:
        """Waits on the device until every rank is here: what follows starts within microseconds on all."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1, device=self.device), group=self.parallel.world.handle)

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank; the device is not asked."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.parallel.sizes.world
        dist.all_gather_object(values, value, group=self.team.channel.group)
        return values

    def slowest(self, run: Callable[[], None], *, rounds: int) -> list[float]:
        """Milliseconds of calls that all ranks begin together: of each round the longest, ascending."""
        from halocline.benchmarks import device_clock

        for _ in range(3):
            run()
        device_clock.settle()
        own = []
        for _ in range(rounds):
            self.meet()
            own.append(device_clock.milliseconds_once(run))
        return sorted(max(times) for times in zip(*self.all(own), strict=True))


def in_modes(
    rows: Rows,
    options: argparse.Namespace,
    names: Sequence[str],
    work: Callable[[Rank], None],
    **params: object,
) -> None:
    """Runs a part's work on the ranks of each mode, or, in a rank, the work of that rank.

    Args:
        rows: Of the part.
        options: Its command line.
        names: Modes to run one after the other; a rank runs the one that it was started for.
        work: What each rank does.
        params: Of the rows about how they ended.
    """
    if is_rank():
        with _joined(rows, options, options.modes[0]) as rank:
            work(rank)
        return
    for name in names:
        asked = {"mode": name, **params}
        begun = time.monotonic()
        arguments = [*_without_modes(options.arguments), "--modes", name]
        status = launch_ranks(["gpu_parts", *arguments], MODES[name].sizes.world, module="halocline.benchmarks")
        row = f"{options.part}.ranks"
        if status:
            rows.failures += 1
            rows.add(row, f"the ranks ended with {status}; the part's log says why", "error", params=asked)
        else:
            rows.add(f"{row}.seconds", round(time.monotonic() - begun, 2), "s", params=asked)


def _without_modes(arguments: Sequence[str]) -> list[str]:
    """A command line without its --modes, which stand between two other options or at the end."""
    kept: list[str] = []
    skipping = False
    for word in arguments:
        skipping = word == "--modes" or (skipping and not word.startswith("--"))
        if not skipping:
            kept.append(word)
    return kept


@contextmanager
def _joined(rows: Rows, options: argparse.Namespace, name: str) -> Iterator[Rank]:
    """Joins the other ranks and leaves them again; what fails ends all of them and is a row."""
    begun, mode, settings = time.perf_counter(), MODES[name], process_settings()
    set_variables_of_ranks()
    from halocline.engine.device_memory import local_device
    from halocline.engine.ranks.team import Team
    from halocline.hal.probe import probe

    place = settings.place()
    assert place is not None
    team = Team(settings, mode.sizes, a2a=mode.a2a)
    device = local_device(probe(settings), place)
    with team.reporting(), _noting(rows, options, {"mode": name, "rank": place.rank}):
        parallel = team.open_groups(device)
        yield Rank(
            team=team,
            parallel=parallel,
            device=device,
            name=name,
            mode=mode,
            start=round(time.perf_counter() - begun, 2),
        )
        gc.collect()  # recorded graphs go before the groups that they hold
        team.wait_for_all()
    team.leave()


@contextmanager
def _noting(rows: Rows, options: argparse.Namespace, params: Mapping[str, object]) -> Iterator[None]:
    """Leaves a row and the trace of what fails in a rank, before the ranks end."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(f"rank {params['rank']}, mode {params['mode']}:\n{text}")
        sys.stderr.flush()
        said = f"{type(error).__name__}: {error}"
        rows.add(f"{options.part}.rank", f"{said[:600]} | {text[-900:]}", "error", params=params)
        raise
