"""What ranks say to each other and know of each other, piece by piece; whole runs are in tests/parallel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from halocline.engine.ranks.channel import PlanChannel
from halocline.engine.ranks.fingerprint import compare_facts, setting_facts
from halocline.engine.ranks.joining import check_world, join_ranks
from halocline.engine.ranks.processes import ProcessMark
from halocline.engine.ranks.team import Team
from halocline.engine.ranks.watch import Failure
from halocline.engine.step_plan import StepPlan, StepShape
from halocline.hal.errors import ConfigError, MachineError, SettingsError
from halocline.hal.place import RankPlace, read_place
from halocline.hal.settings import Settings, child_environment, set_variables_of_ranks
from halocline.models.parallel import ParallelSizes

PLACE = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


# ---- the place of a process -----------------------------------------------------------------------------------------


def test_a_place_is_what_the_launcher_says() -> None:
    place = Settings.read({**PLACE, "HOME": "/root"}).place()
    assert place == RankPlace(rank=3, world=4, local_rank=1, local_world=2, address="10.0.0.1", port=29500)
    assert place.variables() == PLACE
    assert Settings.read({}).place() is None
    assert Settings.read({**PLACE, "WORLD_SIZE": "1", "RANK": "0"}).place() is None, "one process is alone"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": ""}, "WORLD_SIZE is 4, but RANK is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"LOCAL_RANK": "one"}, "bad value for LOCAL_RANK"),
        ({"RANK": "4"}, "contradict each other"),
        ({"LOCAL_WORLD_SIZE": "5"}, "contradict each other"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_place({**PLACE, **changes})


def test_timeouts_are_finite_and_at_least_a_second() -> None:
    assert Settings.read({"HALOCLINE_RANK_TIMEOUT": "7.5"}).rank_timeout == 7.5
    for text in ("0", "-3", "soon", "inf", "nan"):
        with pytest.raises(SettingsError, match="seconds, from 1 to 86400"):
            Settings.read({"HALOCLINE_COLLECTIVE_TIMEOUT": text})


def test_sizes_must_make_the_world_that_was_started() -> None:
    place = read_place(PLACE)
    check_world(ParallelSizes(tp=2, dp=2), place)
    check_world(ParallelSizes(), None)
    with pytest.raises(ConfigError, match=r"tp 2, dp 1, ep 1 makes 2 rank\(s\), but 4 were started") as caught:
        check_world(ParallelSizes(tp=2), place)
    assert "tp 4, dp 1, ep 4" in str(caught.value)
    with pytest.raises(ConfigError, match=r"makes 2 .* but 1 was started"):
        check_world(ParallelSizes(tp=2), None)
    assert join_ranks(Settings(), ParallelSizes()) is None


# ---- what they compare ----------------------------------------------------------------------------------------------


def test_the_first_difference_names_rank_field_and_both_values() -> None:
    same = {"version": "1", "table of kernels": "abc"}
    compare_facts([same, dict(same), dict(same)])
    with pytest.raises(SettingsError) as caught:
        compare_facts([same, same, {**same, "table of kernels": "xyz"}])
    message = str(caught.value)
    assert message == (
        "rank 2 does not start like rank 0: table of kernels is xyz there and abc on rank 0; start all ranks alike"
    )
    with pytest.raises(SettingsError, match=r"rank 1 .* version is nothing there and 1 on rank 0"):
        compare_facts([same, {"table of kernels": "abc"}])


def test_settings_of_one_process_alone_may_differ() -> None:
    own = {"HALOCLINE_VERBOSITY": "2", "HALOCLINE_CACHE_DIR": "/x", "HALOCLINE_DUMP_DIR": "/y"}
    assert setting_facts(Settings.read(own)) == setting_facts(Settings.read({}))
    shared = {"HALOCLINE_PREFILL_LAYOUT": "paged"}
    assert setting_facts(Settings.read(shared)) != setting_facts(Settings.read({}))


# ---- plans on their way ---------------------------------------------------------------------------------------------


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> deque[torch.Tensor]:
    """Broadcasts of one process: what the source sends lies here until the other end asks."""
    blocks: deque[torch.Tensor] = deque()

    def broadcast(tensor: torch.Tensor, *, src: int, group: Any) -> None:
        assert src == 0
        if group == "source":
            blocks.append(tensor.clone())
        else:
            sent = blocks.popleft()
            assert sent.shape == tensor.shape, "both ends know how long a block is"
            tensor.copy_(sent)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    return blocks


def plan_of(size: int, tokens: int = 1) -> StepPlan:
    return StepPlan(
        shape=StepShape(mixed=False, num_tokens=tokens, sampled=tokens),
        packed=torch.arange(size, dtype=torch.int32).to(torch.uint8),
        num_requests=tokens,
        num_decode=tokens,
        num_sampled=tokens,
        max_seqlen=9,
    )


@pytest.mark.parametrize("size", [0, 100, 40_000, 40_960, 40_961, 200_000])
def test_plans_arrive_whole_whatever_their_length(wire: deque[torch.Tensor], size: int) -> None:
    source: Any = PlanChannel("source")  # type: ignore[arg-type]
    other: Any = PlanChannel("other")  # type: ignore[arg-type]
    source.send_start({"config": {"graph_sizes": [1, 2]}, "num_token_pages": 7})
    source.add(0, plan_of(size))
    source.add(1, plan_of(33, tokens=3))
    source.send()
    source.send_stop()
    start, step, stop = other.receive(), other.receive(), other.receive()
    assert (start.kind, start.facts) == ("start", {"config": {"graph_sizes": [1, 2]}, "num_token_pages": 7})
    assert step.kind == "plans"
    assert [group for group, _ in step.plans] == [0, 1]
    for (_, found), sent in zip(step.plans, (plan_of(size), plan_of(33, tokens=3)), strict=True):
        assert torch.equal(found.packed, sent.packed)
        assert found.shape == sent.shape
    assert stop.kind == "stop"
    assert not wire


def test_a_lost_message_is_noticed(wire: deque[torch.Tensor]) -> None:
    source: Any = PlanChannel("source")  # type: ignore[arg-type]
    other: Any = PlanChannel("other")  # type: ignore[arg-type]
    for _ in range(2):
        source.add(0, plan_of(10))
        source.send()
    wire.popleft()
    with pytest.raises(MachineError, match="a message between ranks was lost"):
        other.receive()


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for input."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def mark_of(pid: int) -> ProcessMark:
    return ProcessMark(pid=pid, started=int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))


def test_a_process_runs_is_stopped_and_ends(child: subprocess.Popen[bytes]) -> None:
    mark = mark_of(child.pid)
    assert mark.state() == "running"
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert mark.state() == "stopped"
    mark.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert mark.state() == "gone", "a zombie has ended"
    child.wait()
    assert mark.state() == "gone"


def test_a_later_process_of_the_same_number_is_another_one(child: subprocess.Popen[bytes]) -> None:
    mark = mark_of(child.pid)
    earlier = ProcessMark(pid=mark.pid, started=mark.started - 1)
    assert earlier.state() == "gone"
    earlier.kill()
    assert child.poll() is None, "it was left alone"
    assert ProcessMark.own().state() == "running"


# ---- their environment ----------------------------------------------------------------------------------------------


def test_a_rank_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own it brings its place, and defaults for libraries where nothing is set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    place = RankPlace(rank=1, world=2, local_rank=1, local_world=2, address="127.0.0.1", port=1234)
    found = child_environment(place, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"], found["NCCL_NVLS_ENABLE"]) == ("7", "lo", "0")
    assert (found["NCCL_GRAPH_REGISTER"], found["NVSHMEM_DISABLE_NVLS"]) == ("0", "1"), "from its first line on"
    assert read_place(found) == place


def test_multicast_between_gpus_is_off_unless_the_user_says_otherwise() -> None:
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "TORCH_CPP_LOG_LEVEL")
    with mock.patch.dict(os.environ, {"TORCH_CPP_LOG_LEVEL": "INFO"}):
        for name in names[:3]:
            os.environ.pop(name, None)
        set_variables_of_ranks()
        assert [os.environ.get(name) for name in names] == ["0", "1", "1", "INFO"]


# ---- their failure --------------------------------------------------------------------------------------------------


class _Watch:
    """A watch of a rank that is the first to fail."""

    def __init__(self) -> None:
        self.told: list[Failure] = []

    def report(self, failure: Failure) -> bool:
        self.told.append(failure)
        return True


def _failing_team() -> tuple[Team, _Watch]:
    team, watch = Team.__new__(Team), _Watch()
    team.place = RankPlace(rank=1, world=2, local_rank=1, local_world=2, address="127.0.0.1", port=1234)
    team.watch = watch  # type: ignore[assignment]
    return team, watch


def _fault() -> None:
    raise TypeError("a list where a number belongs")


def test_a_fault_of_ours_ends_in_one_line_and_the_log_shows_where(caplog: pytest.LogCaptureFixture) -> None:
    team, watch = _failing_team()
    with pytest.raises(MachineError, match=r"^TypeError: a list where a number belongs$"), team.reporting():
        _fault()
    assert [(told.rank, told.message) for told in watch.told] == [(1, "rank 1: a list where a number belongs")]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "in _fault\n" in caplog.text


def test_an_error_that_explains_itself_needs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    team, _ = _failing_team()
    with pytest.raises(MachineError, match="no room"), team.reporting():
        raise MachineError("no room")
    assert caplog.records == []
