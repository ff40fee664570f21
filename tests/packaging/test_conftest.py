"""The rules that hold for every test, tried on small suites of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """An empty suite that has our conftest."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    cuda: x\n    hip: x\n"
    )
    return tmp_path


def run(suite: Path, body: str, *, allowed: int, options: tuple[str, ...] = ("--skip-limit",)) -> tuple[int, list[str]]:
    """Status and lines of output."""
    (suite / "tests" / "skips_allowed.txt").write_text(f"{allowed} skips\n")
    (suite / "tests" / "test_it.py").write_text(f"import pytest\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout.splitlines()


NAMED = "def test_a(): pytest.skip('needs a bigger boat')\ndef test_b(): pass"


def test_a_named_skip_within_the_limit_passes_and_the_count_is_printed(suite: Path) -> None:
    status, lines = run(suite, NAMED, allowed=1)
    assert status == 0
    assert "skips: 1 (allowed 1)" in lines
    assert "1 passed, 1 skipped" in lines[-1]


def test_more_skips_than_allowed_fail_the_run(suite: Path) -> None:
    status, lines = run(suite, NAMED, allowed=0)
    assert status == 1
    assert "skips: 1 tests were skipped, 0 are allowed by tests/skips_allowed.txt" in lines


def test_without_the_option_skips_are_only_counted(suite: Path) -> None:
    status, lines = run(suite, NAMED, allowed=0, options=())
    assert status == 0
    assert "skips: 1 (allowed 0)" in lines


def test_the_limit_holds_over_several_workers(suite: Path) -> None:
    pytest.importorskip("xdist")
    status, lines = run(suite, NAMED, allowed=0, options=("--skip-limit", "-p", "xdist", "-n", "2"))
    assert status == 1
    assert "skips: 1 (allowed 0)" in lines


def test_a_skip_that_does_not_say_what_it_needs_fails_the_run(suite: Path) -> None:
    status, lines = run(suite, "def test_a(): pytest.skip('flaky')\ndef test_b(): pass", allowed=5)
    assert status == 1
    assert any("test_it.py::test_a does not say what it needs: 'flaky'" in line for line in lines)


def test_a_missing_module_is_named_by_importorskip(suite: Path) -> None:
    status, _ = run(suite, "def test_a(): pytest.importorskip('no_such_module')\ndef test_b(): pass", allowed=1)
    assert status == 0


def test_settings_of_the_person_who_runs_the_tests_are_gone(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCLINE_KERNELS", "a=b")
    status, _ = run(suite, "import os\ndef test_a(): assert 'HALOCLINE_KERNELS' not in os.environ", allowed=0)
    assert status == 0


def test_a_connection_beyond_this_machine_is_refused() -> None:
    with socket.socket() as client, pytest.raises(AssertionError, match="tests use this machine only"):
        client.connect(("192.0.2.1", 80))


def test_a_connection_on_this_machine_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
