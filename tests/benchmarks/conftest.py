"""Parts of a GPU session, run in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halocline.benchmarks import gpu_parts
from halocline.benchmarks.gpu_rows import read_rows


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Runs a part at tiny sizes and gives its rows."""

    def running(*words: str) -> list[dict[str, Any]]:
        out = tmp_path / "out"
        gpu_parts.main([*words, "--tiny", "--out", str(out), "--commit", "c"])
        return read_rows(out / "rows.jsonl")

    before = signal.getsignal(signal.SIGTERM)
    yield running
    signal.signal(signal.SIGTERM, before)
