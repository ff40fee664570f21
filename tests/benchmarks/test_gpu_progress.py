"""A part's log tells what its program said and how folders of compiled kernels grew, while they do."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from halocline.benchmarks import gpu_progress
from halocline.benchmarks.gpu_progress import kernels_kept, run_and_show, telling_of_kernels


def test_messages_are_shown_and_kept_apart_from_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('{}'); print('one', file=sys.stderr); print('two', file=sys.stderr); sys.exit(3)"
    done = run_and_show([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (3, "{}\n", "one\ntwo\n")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["one", "two"]
    assert all(float(line.split()[0]) >= 0 for line in shown)


def test_what_a_program_prints_does_not_hold_it_up() -> None:
    """More than a pipe holds, before and after a message."""
    program = "import sys; print('x' * 200_000); print('said', file=sys.stderr); print('y' * 200_000)"
    done = run_and_show([sys.executable, "-c", program])
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 400_002, "said\n")


def test_a_part_that_is_ended_does_not_wait_for_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal raises where messages are read; the program would never end by itself."""

    def end(_begun: float, _line: str) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(gpu_progress, "_show", end)
    program = "import signal, sys; print('here', file=sys.stderr, flush=True); signal.pause()"
    with pytest.raises(SystemExit):
        run_and_show([sys.executable, "-c", program])


def test_growing_folders_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (tmp_path / "triton", tmp_path / "deep_gemm")
    told, lines = threading.Event(), list[str]()

    def show(_begun: float, line: str) -> None:
        lines.append(line)
        told.set()

    monkeypatch.setattr(gpu_progress, "cache_folders", lambda _: folders)
    monkeypatch.setattr(gpu_progress, "_show", show)
    with telling_of_kernels(every=0.01):
        (folders[0] / "a").mkdir(parents=True)
        (folders[0] / "a" / "kernel.cubin").touch()
        assert told.wait(30)
    assert lines == ["files of compiled kernels: triton 1, deep_gemm 0"]
    assert kernels_kept(folders) == {"triton": 1, "deep_gemm": 0}
