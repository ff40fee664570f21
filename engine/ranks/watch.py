"""RankWatch: notices a rank that is gone, stopped or silent, and ends this process with the reason.

Each rank has a thread that beats in the store about twice a second and looks at all others. What runs on the same
machine is looked up in /proc, so that a killed or stopped rank is known within a second or two and a busy one is not
mistaken for it; a rank elsewhere counts as lost after `rank_timeout` seconds without a beat. The first to know writes
the reason into the store and says it; whoever reads it ends. Nobody waits for a collective that will never come: the
thread ends the process, whatever its other threads do.
"""

from __future__ import annotations

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

__all__ = ["Failure", "RankWatch", "prefixed", "watch_store"]

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 0.5
_STORE_ERRORS = 3
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
    bad_looks: int = 0


class RankWatch:
    """Watches the other ranks from a thread of its own until `leave`.

    Attributes:
        failure: Why this process is about to end, once that is known.
    """

    def __init__(
        self,
        place: RankPlace,
        store: Any,
        *,
        rank_timeout: float,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """Says who this rank is and starts watching when all have.

        Args:
            place: Of this rank.
            store: For this object alone.
            rank_timeout: Seconds without a beat after which a rank counts as lost.
            end: Ends the process with a status.
        """
        self._place = place
        self._store = prefixed("halocline/watch", store)
        self._rank_timeout = rank_timeout
        self._end = end
        self._beats = 0
        self._store_errors = 0
        self._leaving = threading.Event()
        self._known = threading.Event()
        self.failure: Failure | None = None
        own = ProcessMark.own()
        host = _host()
        self._store.set(f"who/{place.rank}", json.dumps({"host": host, **asdict(own)}))
        self._beat()
        self._others = {rank: self._meet(rank, host) for rank in range(place.world) if rank != place.rank}
        self._thread = threading.Thread(target=self._run, name="halocline-watch", daemon=True)
        self._thread.start()

    def _meet(self, rank: int, host: str) -> _Other:
        who = json.loads(self._store.get(f"who/{rank}"))
        is_local = who["host"] == host
        mark = ProcessMark(pid=who["pid"], started=who["started"]) if is_local else None
        return _Other(host=who["host"], pid=who["pid"], mark=mark, seen=time.monotonic())

    # ---- what the rest of the process asks ------------------------------------------------------------------------

    def report(self, failure: Failure) -> bool:
        """Tells all ranks to end.

        Returns:
            Whether this was the first reason that anybody gave: then, and only then, it has to be said.
        """
        mine = json.dumps(asdict(failure)).encode()
        found = self._store.compare_set("failure", "", mine.decode())
        self._leaving.set()  # this process ends by itself
        return bytes(found) == mine

    def wait_for_failure(self, seconds: float) -> None:
        """Gives the watch time to find out why an exchange failed; if it does, this process ends here."""
        self._known.wait(seconds)

    def leave(self) -> None:
        """Says that this rank ends in good order. A second call does nothing."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._thread.join()
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

    # ---- on the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._leaving.wait(_BEAT_SECONDS):
            failure = self._look_at_processes()
            try:
                self._beat()
                failure = self._read_store() or (self._announce(failure) if failure is not None else None)
                self._store_errors = 0
            except RuntimeError as error:
                failure = failure or self._without_store(error)
                if failure is not None and self._speaks_for_all(failure):
                    self._say(failure)
            if failure is not None and not self._leaving.is_set():
                self._finish(failure)
                return

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._place.rank}", str(self._beats))

    def _look_at_processes(self) -> Failure | None:
        """A rank on this machine that is gone or stopped, if two looks in a row say so."""
        for rank, other in self._others.items():
            if other.mark is None or other.beat == _LEFT:
                continue
            state = other.mark.state()
            other.bad_looks = other.bad_looks + 1 if state != "running" else 0
            if other.bad_looks > 1:
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
            elif now - other.seen > self._rank_timeout:
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
        """What to make of a store that does not answer: whoever holds it is gone, most likely rank 0."""
        logger.debug("the store does not answer: %s", error)
        self._store_errors += 1
        first = self._others.get(0)
        if self._store_errors < _STORE_ERRORS:
            return None
        where = f" (process {first.pid} on {first.host})" if first is not None else ""
        return Failure(rank=0, message=f"the store of rank 0{where} does not answer")

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
        self._known.set()
        lost = self._others.get(failure.rank)
        if lost is not None and lost.mark is not None and lost.mark.state() == "stopped":
            lost.mark.kill()
        sys.stdout.flush()
        self._end(failure.exit_code)


def _host() -> str:
    """Tells machines, and containers with process numbers of their own, apart."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"


def prefixed(prefix: str, store: Any) -> Any:
    """The part of a store whose keys begin so."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # torch's stubs leave stores out


def watch_store(place: RankPlace, timeout: timedelta) -> Any:
    """A connection to the store for the watch alone, as calls on one connection wait for each other."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False, multi_tenant=False
    )
