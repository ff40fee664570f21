"""RankWatch: notices a rank that is gone, stopped or silent, and ends this process with the reason.

Each rank beats in the store about twice a second and looks at all others. What runs on the same machine is looked up
in /proc, so that a killed or stopped rank is known within a second or two and a busy one is not mistaken for it; a rank
elsewhere counts as lost after `rank_timeout` seconds without a beat. The first to know writes the reason into the store
and says it; whoever reads it ends. Nobody waits for a collective that will never come: a thread of the watch ends the
process, whatever its other threads do.

There are two threads, because a store whose process was stopped does not answer and has no deadline: one talks to the
store, the other looks at processes and at the first one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from halocline.engine.ranks.processes import ProcessMark

if TYPE_CHECKING:
    from halocline.hal.place import RankPlace

__all__ = ["Failure", "RankWatch", "prefixed"]

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.2
_STORE_SECONDS = 1.0
_MOST_RESETS = 3
_LEFT = b"left"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why all ranks have to end.

    Attributes:
        rank: Which one has failed.
        message: What happened.
        exit_code: Status with which all end.
    """

    rank: int
    message: str
    exit_code: int = 1


@dataclass(eq=False, kw_only=True)
class _Other:
    """What is known of another rank; `mark` only of one on this machine."""

    host: str
    pid: int
    mark: ProcessMark | None
    beat: bytes = b""
    seen: float = 0.0


class RankWatch:
    """Watches the other ranks from a thread of its own until `leave`.

    Attributes:
        failure: Why this process is about to end, once that is known.
    """

    def __init__(
        self,
        place: RankPlace,
        *,
        start_timeout: float,
        rank_timeout: float,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """Says who this rank is and starts watching when all have.

        Args:
            place: Of this rank.
            start_timeout: Seconds in which all ranks have to come.
            rank_timeout: Seconds without a beat after which a rank counts as lost.
            end: Ends the process with a status.
        """
        self._place = place
        self._store = _connect(place, start_timeout)
        self._rank_timeout = rank_timeout
        self._end = end
        self._beats = 0
        self._resets = 0
        self._pending: Failure | None = None
        self._answered = time.monotonic()
        self._leaving = threading.Event()
        self._settled = threading.Event()
        self.failure: Failure | None = None
        own = ProcessMark.own()
        host = _host()
        self._store.set(f"who/{place.rank}", json.dumps({"host": host, **asdict(own)}))
        self._beat()
        self._others = {rank: self._meet(rank, host) for rank in range(place.world) if rank != place.rank}
        self._store = _connect(place, _STORE_SECONDS)
        self._threads = [
            threading.Thread(target=run, name=f"halocline-{name}", daemon=True)
            for name, run in (("watch", self._watch_processes), ("beat", self._watch_store))
        ]
        for thread in self._threads:
            thread.start()

    def _meet(self, rank: int, host: str) -> _Other:
        who = json.loads(self._store.get(f"who/{rank}"))
        is_local = who["host"] == host
        mark = ProcessMark(pid=who["pid"], started=who["started"]) if is_local else None
        return _Other(host=who["host"], pid=who["pid"], mark=mark, seen=time.monotonic())

    # ---- what the rest of the process asks ------------------------------------------------------------------------

    def report(self, failure: Failure) -> bool:
        """Tells all ranks to end.

        Returns:
            Whether this was the first reason that anybody gave: then, and only then, it has to be said, and this
            process ends by itself. Else the watch ends it.
        """
        mine = json.dumps(asdict(failure)).encode()
        is_first = bytes(self._store.compare_set("failure", "", mine.decode())) == mine
        if is_first:
            self._leaving.set()
        return is_first

    def wait_for_end(self, seconds: float) -> None:
        """Gives the watch time to find out what has happened: if it does, this process ends before this returns."""
        self._leaving.wait(seconds)

    def leave(self) -> None:
        """Says that this rank ends in good order. A second call does nothing."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        for thread in self._threads:
            thread.join(_STORE_SECONDS)
        try:
            self._store.set(f"beat/{self._place.rank}", _LEFT.decode())
        except RuntimeError:
            logger.debug("the store is gone already")

    def wait_for_others(self, seconds: float) -> None:
        """After `leave`: waits until all other ranks have left too, so that the store stays as long as it is needed."""
        end = time.monotonic() + seconds
        left: set[int] = set()
        while len(left) < len(self._others) and time.monotonic() < end:
            for rank, other in self._others.items():
                if bytes(self._store.get(f"beat/{rank}")) == _LEFT or (other.mark and other.mark.state() == "gone"):
                    left.add(rank)
            time.sleep(0.01)

    # ---- on the threads -------------------------------------------------------------------------------------------

    def _watch_processes(self) -> None:
        answered, silence = self._answered, 0.0
        while not self._leaving.wait(_BEAT_SECONDS):
            failure = self._look_at_processes()
            # Looks are counted, not seconds: a compiler may hold all threads of a process for a minute.
            answered, silence = self._answered, silence + _BEAT_SECONDS if answered == self._answered else 0.0
            if failure is None and silence > self._rank_timeout:
                failure = Failure(rank=0, message=f"the store did not answer for {silence:.0f} s")
            if failure is None:
                continue
            self._pending = failure
            if not self._settled.wait(2 * _STORE_SECONDS) and not self._leaving.is_set():
                if self._speaks_for_all(failure):  # the other thread could not find out who does
                    self._say(failure)
                self._finish(failure)
            return

    def _watch_store(self) -> None:
        while not self._leaving.wait(_BEAT_SECONDS if self._pending is None else 0.0):
            pending = self._pending
            try:
                self._beat()
                failure = self._read_store() or (self._announce(pending) if pending is not None else None)
                self._resets, self._answered = 0, time.monotonic()
            except RuntimeError as error:
                failure = pending or self._without_store(error)
                if failure is not None and self._speaks_for_all(failure):
                    self._say(failure)
            if failure is not None and not self._leaving.is_set():
                if self._resets == 0:  # the store answers; rank 0 waits for this before it takes the store away
                    with contextlib.suppress(RuntimeError):
                        self._store.set(f"beat/{self._place.rank}", _LEFT.decode())
                self._finish(failure)
                return
            if pending is not None:  # it had left in good order
                self._settled.set()
                return

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._place.rank}", str(self._beats))

    def _look_at_processes(self) -> Failure | None:
        """A rank on this machine that has ended or was stopped, if a second look says the same."""
        for rank, other in self._others.items():
            if other.mark is None or other.beat == _LEFT or other.mark.state() == "running":
                continue
            self._leaving.wait(_LOOK_AGAIN_SECONDS)
            state = other.mark.state()
            if state != "running":
                how = "has ended" if state == "gone" else "was stopped"
                return Failure(rank=rank, message=f"rank {rank} (process {other.pid}) {how}")
        return None

    def _read_store(self) -> Failure | None:
        """A failure that somebody has written, or a rank that does not beat any more."""
        if self._store.check(["failure"]):
            return Failure(**json.loads(self._store.get("failure")))
        now = time.monotonic()
        for rank, other in self._others.items():
            beat = bytes(self._store.get(f"beat/{rank}"))
            if beat != other.beat or beat == _LEFT:
                other.beat, other.seen = beat, now
            elif other.mark is None and now - other.seen > self._rank_timeout:  # else it is only busy
                silence = f"gave no sign of life for {now - other.seen:.0f} s"
                failure = Failure(rank=rank, message=f"rank {rank} (process {other.pid} on {other.host}) {silence}")
                return self._announce(failure)
        return None

    def _announce(self, failure: Failure) -> Failure | None:
        """Writes a reason into the store unless there is one; says it if it is ours."""
        if self._others[failure.rank].beat == _LEFT:
            return None
        if bytes(self._store.get(f"beat/{failure.rank}")) == _LEFT:
            self._others[failure.rank].beat = _LEFT
            return None
        mine = json.dumps(asdict(failure)).encode()
        found = bytes(self._store.compare_set("failure", "", mine.decode()))
        if found == mine:
            self._say(failure)
        return Failure(**json.loads(found))

    def _without_store(self, error: Exception) -> Failure | None:
        """What to make of a store that fails again and again: whoever holds it is gone, most likely rank 0."""
        logger.debug("the store fails: %s", error)
        self._resets += 1
        if self._resets < _MOST_RESETS:
            return None
        first = self._others.get(0)
        where = f" (process {first.pid} on {first.host})" if first is not None else ""
        return Failure(rank=0, message=f"the connection to the store of rank 0{where} is lost")

    def _speaks_for_all(self, failure: Failure) -> bool:
        """Whether this is the first of the ranks that are left: it speaks when the store cannot settle who does."""
        left = [
            rank
            for rank, other in self._others.items()
            if rank != failure.rank and (other.mark is None or other.mark.state() == "running")
        ]
        return all(self._place.rank < rank for rank in left)

    def _say(self, failure: Failure) -> None:
        sys.stderr.write(f"{failure.message}; all {self._place.world} ranks end\n")
        sys.stderr.flush()

    def _finish(self, failure: Failure) -> None:
        """Ends this process, and a stopped rank on this machine, which cannot do it itself."""
        self.failure = failure
        lost = self._others.get(failure.rank)
        if lost is not None and lost.mark is not None and lost.mark.state() == "stopped":
            lost.mark.kill()
        sys.stdout.flush()
        self._end(failure.exit_code)
        self._settled.set()


def _host() -> str:
    """Tells machines, and containers with process numbers of their own, apart."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"


def prefixed(prefix: str, store: Any) -> Any:
    """The part of a store whose keys begin so."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # torch's stubs leave stores out


def _connect(place: RankPlace, seconds: float) -> Any:
    """A connection to the store for one object alone, as calls on one connection wait for each other."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.address, place.port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
    )
    return prefixed("halocline/watch", store)
