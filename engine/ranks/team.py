"""Team: this process among all ranks, from joining to leaving. Made once in a process that a launcher has started."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from halocline.engine.ranks.channel import PlanChannel
from halocline.engine.ranks.fingerprint import compare_facts
from halocline.engine.ranks.joining import check_world
from halocline.engine.ranks.watch import Failure, RankWatch, prefixed
from halocline.hal.errors import HaloclineError, MachineError, lines
from halocline.hal.process_group import connect
from halocline.hal.settings import set_variables_of_ranks
from halocline.models.parallel import make_parallel

if TYPE_CHECKING:
    from halocline.hal.settings import Settings
    from halocline.models.parallel import AllToAll, Parallel, ParallelSizes

__all__ = ["Team"]

logger = logging.getLogger(__name__)

_EXPLAIN_SECONDS = 4.0
_LEAVE_SECONDS = 5.0
# Waiting for work is no failure: what ends it is the watch, not a deadline.
_FOR_EVER = timedelta(days=365)


class Team:
    """One rank's ties to the others.

    Attributes:
        place: Of this process.
        sizes: Over how many ranks everything is spread.
        channel: Brings plans.
        parallel: Groups for the model's collectives, once `open_groups` has made them.
    """

    def __init__(self, settings: Settings, sizes: ParallelSizes, *, a2a: AllToAll = "none") -> None:
        """Waits until all ranks are there.

        Args:
            settings: Of the process; its place among the ranks included.
            sizes: Over how many ranks everything is spread.
            a2a: How tokens reach their experts.

        Raises:
            ConfigError: If the sizes take another number of processes.
            MachineError: If the others cannot be reached.
        """
        place = settings.place()
        check_world(sizes, place)
        assert place is not None
        self.place = place
        self.sizes = sizes
        self.parallel: Parallel | None = None
        self._a2a = a2a
        self._timeout = timedelta(seconds=settings.collective_timeout)
        self._left = False
        set_variables_of_ranks()
        try:
            store, _, _ = next(rendezvous("env://", rank=place.rank, world_size=place.world, timeout=self._timeout))
            self.watch = RankWatch(place, start_timeout=settings.collective_timeout, rank_timeout=settings.rank_timeout)
            dist.init_process_group(
                "gloo",
                store=prefixed("halocline/ranks", store),
                rank=place.rank,
                world_size=place.world,
                timeout=self._timeout,
            )
        except RuntimeError as error:
            raise MachineError(
                lines(
                    f"rank {place.rank} cannot reach the other {place.world - 1} rank(s)",
                    found=str(error).splitlines()[0],
                    try_=f"the same MASTER_ADDR and MASTER_PORT for all ({place.address} port {place.port} here)",
                )
            ) from error
        if not self.is_leader and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 drains, and says when it is time
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        control = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        assert isinstance(control, dist.ProcessGroup)
        self.channel = PlanChannel(control)

    @property
    def is_leader(self) -> bool:
        """Whether this rank schedules and samples."""
        return self.place.rank == 0

    # ---- start ----------------------------------------------------------------------------------------------------

    def compare(self, facts: Mapping[str, str]) -> None:
        """Exchanges what ranks must have in common.

        Raises:
            SettingsError: On every rank, if one differs from rank 0.
        """
        compare_facts(self._all(dict(facts)))

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        numbers: list[int] = self._all(number)
        return min(numbers)

    def _all(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        values: list[Any] = [None] * self.place.world
        dist.all_gather_object(values, value)
        return values

    def open_groups(self, device: str) -> Parallel:
        """Opens the groups of the model's collectives, once."""
        if self.parallel is None:
            if device != "cpu":
                torch.accelerator.set_device_index(torch.device(device).index)
            self.parallel = make_parallel(self.sizes, self.place.rank, device, a2a=self._a2a, timeout=self._timeout)
            connect((self.parallel.attention, self.parallel.data, self.parallel.world), device)
        return self.parallel

    def wait_for_all(self) -> None:
        """Waits until all ranks are here, however long one of them takes; the watch ends it if one is lost."""
        dist.all_gather_object([None] * self.place.world, None, group=self.channel.group)

    # ---- failure --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Lets all ranks end when the body raises; who was first raises, the others end without a word.

        Raises:
            HaloclineError: What the body raised, or, of anything else, one line of it; the log shows where.
        """
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            cause = self.explain(error)
            self.report(cause)
            if cause is error and isinstance(error, Exception) and not isinstance(error, HaloclineError):
                logger.error("rank %d has failed", self.place.rank, exc_info=error)
                cause = MachineError(f"{type(error).__name__}: {error}")
            if cause is error:
                raise
            raise cause from error

    def explain(self, error: BaseException) -> BaseException:
        """What an error means: a failed exchange is the echo of another rank's end, which the watch finds out."""
        if _is_exchange_failure(error):
            self.watch.wait_for_end(_EXPLAIN_SECONDS)
            return MachineError(
                lines(
                    f"rank {self.place.rank} lost its connection to another rank",
                    found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    try_="see what the other ranks say; HALOCLINE_COLLECTIVE_TIMEOUT if one is only slow",
                )
            )
        return error

    def report(self, error: BaseException) -> None:
        """Tells the other ranks of an error; ends this process silently if another rank was first."""
        code = error.exit_code if isinstance(error, HaloclineError) else 1
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        failure = Failure(rank=self.place.rank, message=f"rank {self.place.rank}: {summary}", exit_code=code)
        try:
            is_first = self.watch.report(failure)
        except RuntimeError:
            is_first = True
        if not is_first:
            self.watch.wait_for_end(_EXPLAIN_SECONDS)
            raise SystemExit(code) from None
        if self.is_leader:  # the store ends with this process: the others read the reason before that
            with contextlib.suppress(RuntimeError):
                self.watch.wait_for_others(_EXPLAIN_SECONDS)

    def leave(self) -> None:
        """Ends the ties in good order. A second call does nothing."""
        if self._left:
            return
        self._left = True
        self.watch.leave()
        if self.is_leader:
            self.watch.wait_for_others(_LEAVE_SECONDS)
        # NCCL waits without end for recorded graphs that hold its collectives; whoever kept one must not stop all.
        ending = threading.Thread(target=dist.destroy_process_group, name="halocline-leave", daemon=True)
        ending.start()
        ending.join(_LEAVE_SECONDS)
        if ending.is_alive():
            logger.warning("rank %d left its groups behind: something still holds their graphs", self.place.rank)


def _is_exchange_failure(error: BaseException) -> bool:
    if isinstance(error, HaloclineError):
        return False
    words = ("gloo", "nccl", "connection", "peer", "timed out")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )
