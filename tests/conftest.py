"""What holds for every test: a clean environment, no network, and skips that name what is missing and are counted."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
SKIPS_ALLOWED = ROOT / "tests" / "skips_allowed.txt"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the person who runs the tests changes their outcome."""
    import os

    for name in [name for name in os.environ if name.startswith("HALOCLINE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that connects beyond this machine fails at once instead of depending on somebody's server."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(str(address[0])):
            raise AssertionError(f"a test tried to reach {address[0]}; tests use this machine only")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


# ---- devices ----------------------------------------------------------------------------------------------------

DEVICE_MARKERS = ("cuda", "hip", "multi_gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the missing thing named, what the machine has no device for."""
    marked = [(item, marker) for item in items for marker in DEVICE_MARKERS if item.get_closest_marker(marker)]
    missing = _missing_devices() if marked else {}
    for item, marker in marked:
        if marker in missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {missing[marker]}"))


def _missing_devices() -> dict[str, str]:
    """Marker and the device that is not here; torch is loaded only when a collected test has such a marker."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_amd = torch.version.hip is not None
    missing = {
        "cuda": "an NVIDIA GPU" if count == 0 or is_amd else "",
        "hip": "an AMD GPU" if count == 0 or not is_amd else "",
        "multi_gpu": "two GPUs" if count < 2 else "",
    }
    return {marker: device for marker, device in missing.items() if device}


# ---- skips ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --skip-limit, which CI gives for the whole suite."""
    parser.addoption(
        "--skip-limit",
        action="store_true",
        help="fail when more tests are skipped than tests/skips_allowed.txt says, or one does not say what it needs",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a green run whose skips grew unasked or do not say what is missing."""
    if session.config.getoption("--skip-limit") and session.exitstatus == 0 and _skip_faults(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the number of skips and what is wrong with them, above pytest's closing line."""
    config = terminalreporter.config
    terminalreporter.write_line(f"skips: {len(_skips(config))} (allowed {_allowed()})")
    if config.getoption("--skip-limit"):
        for fault in _skip_faults(config):
            terminalreporter.write_line(f"skips: {fault}", red=True)


def _allowed() -> int:
    return int(SKIPS_ALLOWED.read_text().split()[0])


def _skips(config: pytest.Config) -> Sequence[pytest.TestReport]:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter else []


def _skip_faults(config: pytest.Config) -> list[str]:
    """Everything that is wrong with the skips of a run, one line each."""
    skips = _skips(config)
    faults = [
        f"{report.nodeid} does not say what it needs: {reason!r}"
        for report in skips
        if not (reason := _reason(report)).startswith(("needs ", "could not import"))
    ]
    if len(skips) > _allowed():
        faults.append(f"{len(skips)} tests were skipped, {_allowed()} are allowed by tests/skips_allowed.txt")
    return faults


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
