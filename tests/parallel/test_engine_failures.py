"""A rank lost, stopped, started differently or without a file: all end within 5 s, with one line and no orphan."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_processes import Started, free_port, generate, is_running, start_command, start_rank

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MOST_SECONDS = 5.0
ENDLESS = 1900

Start = Callable[..., Started]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, TINY.replace(o_groups=4).unquantized("float32"), seed=7, num_shards=3, force=True)
    return folder


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that do not outlive the test."""
    started: list[Started] = []

    def keep(make: Callable[..., Started], *args: object, **kwargs: str) -> Started:
        started.append(make(*args, **kwargs))
        return started[-1]

    yield keep
    for process in started:
        process.kill()


def assert_gone(pids: list[int]) -> None:
    """Every one of these has ended; the kernel may take a moment to end the children of a killed parent."""
    end = time.monotonic() + MOST_SECONDS
    while any(map(is_running, pids)) and time.monotonic() < end:
        os.sched_yield()
    assert not [pid for pid in pids if is_running(pid)]


# ---- ranks that the command started ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "number", "how"),
    [
        (0, signal.SIGKILL, "was ended by SIGKILL"),
        (1, signal.SIGKILL, "was ended by SIGKILL"),
        (1, signal.SIGSTOP, "was stopped"),
    ],
)
def test_a_lost_rank_ends_the_command(start: Start, tiny: Path, rank: int, number: signal.Signals, how: str) -> None:
    command = start(start_command, generate(tiny, tokens=ENDLESS, extra=["--tp", "2"]))
    command.wait_for_output()
    pids = command.children()
    os.kill(pids[rank], number)
    ended = command.end()
    assert ended.seconds < MOST_SECONDS
    assert ended.status == 1
    assert ended.said == [f"rank {rank} (process {pids[rank]}) {how}; all 2 ranks end"]
    assert_gone(pids)


def test_ranks_die_with_the_command(start: Start, tiny: Path) -> None:
    command = start(start_command, generate(tiny, tokens=ENDLESS, extra=["--tp", "2"]))
    command.wait_for_output()
    pids = command.children()
    command.process.kill()
    assert len(pids) == 2
    assert_gone(pids)


def test_sigterm_stops_a_generation(start: Start, tiny: Path) -> None:
    command = start(start_command, generate(tiny, tokens=ENDLESS, extra=["--ep", "2"]))
    command.wait_for_output()
    pids = command.children()
    command.process.terminate()
    ended = command.end()
    assert ended.seconds < MOST_SECONDS
    assert (ended.status, ended.said) == (128 + signal.SIGTERM, [])
    assert_gone(pids)


# ---- ranks that another launcher started ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "number", "how"),
    [
        (1, signal.SIGKILL, "has ended"),
        (0, signal.SIGKILL, "has ended"),
        (1, signal.SIGSTOP, "was stopped"),
        (0, signal.SIGSTOP, "was stopped"),
    ],
)
def test_ranks_end_by_themselves_when_one_is_lost(
    start: Start, tiny: Path, rank: int, number: signal.Signals, how: str
) -> None:
    """Nobody stands above these: the rank that is left says why, and ends a stopped one with it."""
    port = free_port()
    arguments = generate(tiny, tokens=ENDLESS, extra=["--tp", "2"])
    ranks = [start(start_rank, i, 2, port, arguments) for i in range(2)]
    ranks[0].wait_for_output()
    begin = time.monotonic()
    ranks[rank].process.send_signal(number)
    ended = [process.end() for process in ranks]
    assert time.monotonic() - begin < MOST_SECONDS
    lost = ranks[rank].process.pid
    assert ended[1 - rank].said == [f"rank {rank} (process {lost}) {how}; all 2 ranks end"]
    assert (ended[1 - rank].status, ended[rank].status) == (1, -signal.SIGKILL)


def test_a_different_setting_stops_all(start: Start, tiny: Path) -> None:
    port = free_port()
    arguments = generate(tiny, tokens=4, extra=["--tp", "2"])
    first = start(start_rank, 0, 2, port, arguments)
    second = start(start_rank, 1, 2, port, arguments, HALOCLINE_PREFILL_LAYOUT="paged")
    ended = [first.end(), second.end()]
    assert abs(ended[1].seconds) < MOST_SECONDS
    assert [one.status for one in ended] == [2, 2]
    said = [line for one in ended for line in one.said]
    assert len(said) == 1
    assert "rank 1 does not start like rank 0: HALOCLINE_PREFILL_LAYOUT is paged there and auto on rank 0" in said[0]


def test_a_missing_file_on_one_rank_stops_all(start: Start, tiny: Path, tmp_path: Path) -> None:
    """As on a second machine whose copy of the checkpoint is incomplete."""
    other = tmp_path / "model"
    shutil.copytree(tiny, other)
    missing = sorted(other.glob("*.safetensors"))[1]
    missing.unlink()
    port = free_port()
    first = start(start_rank, 0, 2, port, generate(tiny, tokens=4, extra=["--tp", "2"]))
    second = start(start_rank, 1, 2, port, generate(other, tokens=4, extra=["--tp", "2"]))
    complaint = second.end()
    silent = first.end()
    assert silent.seconds < MOST_SECONDS
    assert (complaint.status, silent.status) == (2, 2)
    assert silent.said == []
    assert complaint.said[0].startswith("rank 1: CheckpointError: 1 of ")
    assert missing.name in complaint.said[1]


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_of_another_world_are_refused(start: Start, tiny: Path) -> None:
    ended = start(start_rank, 0, 4, free_port(), generate(tiny, tokens=4, extra=["--tp", "2"])).end()
    assert ended.status == 2
    assert "tp 2, dp 1, ep 1 makes 2 rank(s), but 4 were started" in ended.said[0]
    assert "tp 2, dp 2, ep 4" in ended.said[-1]


def test_impossible_sizes_are_refused_before_anything_is_started(start: Start, tiny: Path) -> None:
    ended = start(start_command, generate(tiny, tokens=4, extra=["--tp", "3"])).end()
    assert ended.status == 2
    assert "cannot be split" in ended.said[0]
    assert "possible sizes: 1, 2, 4" in "\n".join(ended.said)
