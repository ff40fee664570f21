"""A session starts parts as the plan says, ends what is late, and goes on where an earlier one stopped."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from pathlib import Path

import pytest

from halocline.benchmarks import gpu_session
from halocline.benchmarks.gpu_criteria import CRITERIA
from halocline.benchmarks.gpu_parts import MODULES, parse
from halocline.benchmarks.gpu_plan import CALLS, PARTS, Part, chosen_parts
from halocline.benchmarks.gpu_rows import Rows, read_rows
from halocline.benchmarks.gpu_session import Session, done_parts
from halocline.benchmarks.gpu_tables import plan_table
from halocline.hal.ops import all_ops

# Stands for a part: notes when it begins and ends, and does as its first word says.
PROGRAM = """
import os, pathlib, signal, sys, time
what, folder = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
log = folder / "order.txt"
with log.open("a") as file: file.write(f"begin {sys.argv[-1]}\\n")
if what == "hang": signal.pause()
if what == "child":
    child = os.spawnlp(os.P_NOWAIT, "tail", "tail", "-f", "/dev/null")
    (folder / "child.pid").write_text(str(child))
    signal.pause()
if what == "cache": (folder / f"{sys.argv[-1]}.cache").write_text(os.environ["TRITON_CACHE_DIR"])
with log.open("a") as file: file.write(f"end {sys.argv[-1]}\\n")
sys.exit(3 if what == "fail" else 0)
"""


def part(
    name: str, what: str = "work", *, gib: int = 1, seconds: int = 60, alone: bool = False, own: bool = False
) -> Part:
    return Part(name=name, command=(what,), proves="", call=1, seconds=seconds, gib=gib, alone=alone, own_caches=own)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    work = tmp_path / "work"
    work.mkdir()
    return Session(
        work=work,
        scratch=tmp_path / "scratch",
        environment={"A": "1"},
        options=("--out", str(work)),
        rows=Rows(tmp_path / "rows.jsonl", part="session", commit="c", device="d"),
        memory_gib=10,
        program=(sys.executable, "-S", "-c", PROGRAM),
    )


def statuses(folder: Path) -> dict[str, str]:
    rows = read_rows(folder / "rows.jsonl")
    return {row["params"]["part"]: row["value"] for row in rows if row["name"] == "session.part"}


def order(session: Session) -> list[str]:
    return (session.work / "order.txt").read_text().splitlines()


def later(seconds: float) -> float:
    return time.monotonic() + seconds


def test_parts_run_side_by_side_as_far_as_memory_goes(session: Session, tmp_path: Path) -> None:
    """Two of 6 GiB do not fit into 10 together: the second begins when the first has ended."""
    session.together([part("a", gib=6), part("b", gib=6)], later(60))
    assert order(session) == ["begin a", "end a", "begin b", "end b"]
    assert statuses(tmp_path) == {"a": "done", "b": "done"}


def test_one_that_takes_more_than_there_is_runs_by_itself(session: Session, tmp_path: Path) -> None:
    session.together([part("large", gib=50)], later(60))
    assert statuses(tmp_path) == {"large": "done"}


def test_a_failure_is_noted_and_the_others_go_on(session: Session, tmp_path: Path) -> None:
    session.together([part("bad", "fail"), part("good")], later(60))
    assert statuses(tmp_path) == {"bad": "ended with 3", "good": "done"}


def test_a_part_that_takes_too_long_is_ended_while_others_run(session: Session, tmp_path: Path) -> None:
    session.together([part("stuck", "hang", seconds=1), part("good")], later(60))
    assert statuses(tmp_path) == {"stuck": "late", "good": "done"}


def test_what_a_late_part_has_started_ends_with_it(session: Session) -> None:
    """A child that lived on would keep the device's memory from the parts behind it."""
    session.together([part("parent", "child", seconds=5)], later(60))
    child = int((session.work / "child.pid").read_text())
    try:
        handle = os.pidfd_open(child)
    except ProcessLookupError:
        return  # it is gone already
    ended, _, _ = select.select([handle], [], [], 10.0)
    os.close(handle)
    assert ended


def test_what_has_no_memory_before_the_deadline_is_not_started(session: Session, tmp_path: Path) -> None:
    session.together([part("stuck", "hang", gib=9), part("waiting", gib=9)], later(1.2))
    assert statuses(tmp_path) == {"stuck": "late", "waiting": "not started"}


def test_timed_parts_run_in_turn_and_leave_time_to_those_behind(session: Session, tmp_path: Path) -> None:
    session.in_turn([part("stuck", "hang", seconds=1, alone=True), part("after", seconds=20, alone=True)], later(21.5))
    assert statuses(tmp_path) == {"stuck": "late", "after": "done"}
    assert order(session) == ["begin stuck", "begin after", "end after"]


def test_caches_of_kernels_are_shared_or_a_part_has_its_own(session: Session, tmp_path: Path) -> None:
    session.together([part("a", "cache"), part("b", "cache", own=True)], later(60))
    scratch = tmp_path / "scratch"
    assert (session.work / "a.cache").read_text() == str(scratch / "triton")
    assert (session.work / "b.cache").read_text() == str(scratch / "own" / "b" / "triton")


def test_a_later_session_runs_what_is_not_done(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", part="session", commit="c", device="d")
    for name, status in (("a", "late"), ("b", "done"), ("a", "done"), ("c", "ended with 1")):
        rows.add("session.part", status, "status", params={"part": name})
    assert done_parts(tmp_path / "rows.jsonl") == {"a", "b"}
    assert done_parts(tmp_path / "absent.jsonl") == set()


# ---- the whole command ----------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of parts that a session would have run."""
    names: list[str] = []

    def run(self: Session, parts: list[Part], deadline: float) -> None:
        for one in parts:
            names.append(one.name)
            self.rows.add("session.part", "done", "status", params={"part": one.name})

    monkeypatch.setattr(Session, "together", run)
    monkeypatch.setattr(Session, "in_turn", run)
    return names


def test_parts_are_chosen_and_not_repeated(tmp_path: Path, started: list[str]) -> None:
    words = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"), "--parts", "graphs,decode"]
    assert gpu_session.main(words) == 0
    assert started == ["graphs", "decode"]
    assert gpu_session.main(words) == 0
    assert started == ["graphs", "decode"]
    assert gpu_session.main([*words, "--again"]) == 0
    assert started == ["graphs", "decode"] * 2


def test_every_call_has_its_own_time_when_none_is_named(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "lacks", lambda *_: "")
    assert gpu_session.main(["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch")]) == 0
    assert sorted(started) == sorted(one.name for one in PARTS)


def test_what_lacks_something_is_not_run_and_says_so(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No prompts, no wheel and no compute-sanitizer are here; they fail nobody's row."""
    words = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"), "--parts", "graded,wheel,graphs"]
    assert gpu_session.main(words) == 0
    assert started == ["graphs"]
    assert "not run: graded lacks prompts.json" in capsys.readouterr().out
    assert statuses(tmp_path / "out") == {
        "graded": "lacks prompts.json",
        "wheel": "lacks halocline wheel",
        "graphs": "done",
    }
    assert json.loads((tmp_path / "out" / "row.json").read_text())["benchmarks"] == {"graphs": 0}


def test_an_unknown_part_is_refused_with_the_known_ones(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_session.main(["--out", str(tmp_path), "--parts", "grphs"]) == 2
    assert "no part is called grphs" in capsys.readouterr().err
    assert started == []


def test_the_row_of_the_matrix_comes_from_the_rows(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", part="x", commit="c" * 40, device="NVIDIA H200")
    rows.add("session.device", "nvidia sm_90 (NVIDIA H200)", "text")
    rows.add("tests.counts", {"executed": 40, "failed": 1, "skipped": 2}, "tests", params={"failed": ["a"]})
    for kernel, within in (("triton", 3), ("deep_gemm", 2)):
        params = {"op": "gemm.linear", "kernel": kernel}
        rows.add("parity.kernel", {"cases": 3, "within": within, "complete": True}, "cases", params=params)
    rows.add("session.part", "done", "status", params={"part": "decode"})
    rows.add("session.part", "late", "status", params={"part": "peer"})
    found = gpu_session.matrix_row(read_rows(tmp_path / "rows.jsonl"))
    assert found["tests"] == {"executed": 40, "failed": 1, "skipped": 2}
    assert found["parity"] == {
        "device": "nvidia sm_90 (NVIDIA H200)",
        "kernels": 2,
        "failed": ["gemm.linear=deep_gemm"],
    }
    assert found["benchmarks"] == {"decode": 0, "peer": 1}
    assert found["commit"] == "c" * 40


def test_sessions_that_share_a_device_divide_its_memory(tmp_path: Path) -> None:
    common = ["--out", str(tmp_path), "--scratch", str(tmp_path / "scratch"), "--commit", "c" * 40]
    for words, wanted in [([], gpu_session.MEMORY_GIB), (["--gib", "40"], 40)]:
        options = gpu_session._parse([*common, *words])
        assert gpu_session._session(options, tmp_path / "rows.jsonl", 0.0).memory_gib == wanted


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_commands_can_be_read() -> None:
    assert len({one.name for one in PARTS}) == len(PARTS)
    for one in PARTS:
        options = parse([*one.command, "--out", "x"])
        assert options.part in MODULES


@pytest.mark.parametrize("call", CALLS)
def test_a_call_fits_into_ten_minutes(call: int) -> None:
    """What checks gets the time that the timed parts leave; each of them alone must fit into it."""
    own = chosen_parts([], [call])
    alone = sum(one.seconds for one in own if one.alone)
    checks = max(one.seconds for one in own if not one.alone)
    assert alone + checks <= 580
    assert alone <= (300 if all(one.gpus == 1 for one in own) else 450)  # with two devices little is left to check


def test_every_part_fits_onto_the_device() -> None:
    assert all(one.gib <= 139 for one in PARTS)
    assert all(one.alone or one.gib <= gpu_session.MEMORY_GIB for one in PARTS)


def test_modules_hold_the_functions_that_are_named() -> None:
    for name, module in MODULES.items():
        source = Path(gpu_session.__file__).with_name(f"{module}.py").read_text()
        assert f"def {'child' if name == 'start_child' else name}(" in source


def test_lines_to_be_shown_are_named_once() -> None:
    assert len({criterion.line for criterion in CRITERIA}) == len(CRITERIA)


def test_rows_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Rows(path, part="p", commit="c", device="d").add("a.b", 1, "ms", params={"x": 2}, roof=0.5, share=0.5)
    with path.open("a") as file:
        file.write('{"name": "cut o')
    (row,) = read_rows(path)
    wanted = {"part", "name", "params", "value", "unit", "roof", "share", "device", "versions", "commit"}
    assert set(row) == wanted
    assert (row["name"], row["params"], row["device"], row["commit"]) == ("a.b", {"x": 2}, "d", "c")


def test_a_failure_inside_a_part_becomes_a_row(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", part="p", commit="c", device="d")

    def broken() -> None:
        raise ValueError("no such thing")

    with rows.guard("a", batch=3):
        broken()
    with rows.guard("b"):
        pass
    first, second = read_rows(tmp_path / "rows.jsonl")
    assert (first["name"], first["unit"], first["params"]) == ("a", "error", {"batch": 3})
    assert first["value"].startswith("ValueError: no such thing | ")
    assert (second["name"], second["unit"], rows.failures) == ("b.seconds", "s", 1)


def test_list_says_what_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_session.main(["--list", "--calls", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[2:-2]] == [f"`{one.name}`" for one in PARTS if one.call == 3]
    assert lines[-1].startswith("Call 3: ")


def test_the_run_book_holds_the_plan() -> None:
    """`./dev gpu --list` prints what belongs between the marks."""
    text = (Path(gpu_session.__file__).resolve().parent.parent / "docs" / "benchmarks.md").read_text()
    _, _, rest = text.partition("<!-- parts: begin -->\n")
    assert rest.partition("<!-- parts: end -->")[0].strip() == plan_table(PARTS).strip()


@pytest.mark.parametrize(("devices", "calls"), [("one device", {1, 2, 3}), ("two devices", {2, 3})])
def test_the_commands_for_a_machine_leave_no_part_out(devices: str, calls: set[int]) -> None:
    """These calls are given part by part there, what is timed apart from what checks."""
    text = (Path(gpu_session.__file__).resolve().parent.parent / "docs" / "benchmarks.md").read_text()
    section = text.partition(f"## One machine of {devices}\n")[2].partition("\n## ")[0].replace(",\\\n    ", ",")
    sessions = re.findall(r"^    one \d \w .*--parts (\S+)", section, re.MULTILINE)
    named = {tuple(chosen_parts(words.split(","), [])) for words in sessions}
    assert sorted(one.name for parts in named for one in parts) == sorted(p.name for p in PARTS if p.call in calls)
    assert all(len({one.alone for one in parts}) == 1 for parts in named)
    assert (1 in calls) != ("one 0 a --wheels $libraries --calls 1 " in section)


@pytest.mark.parametrize("kind", ["overrides", "smallest", "cases"])
def test_parts_that_share_ops_among_them_leave_none_out(kind: str) -> None:
    """Every op is in one of the parts of a kind, by its family or by name."""
    command = {"smallest": "sanitizer"}.get(kind, kind)
    named = [
        word
        for one in PARTS
        if one.command[0] == command and "racecheck" not in one.command and "--kernels" not in one.command
        for word in parse([*one.command, "--out", "x"]).ops
    ]
    assert len(named) == len(set(named))
    missing = [op.name for op in all_ops() if op.name not in named and op.family not in named]
    allowed = [name for name in missing if name.startswith("collective.")] if kind == "smallest" else []
    assert missing == allowed
