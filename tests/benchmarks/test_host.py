"""The host benchmark runs, prints every figure with its bounds, and tells a kept bound from a missed one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from halocline.benchmarks import host

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NAMES = [
    "cpu.sched",
    "cpu.sched-growth",
    "cpu.sched-prefill",
    "cpu.prefix",
    "cpu.prefix-scale",
    "cpu.alloc",
]


def test_table_and_json_hold_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The status follows from the figures; what they are is for the machine to say."""
    status = host.main(["--rounds", "1", "--json", str(tmp_path / "host.json")])
    result = json.loads((tmp_path / "host.json").read_text())
    assert [row["name"] for row in result["rows"]] == NAMES
    assert all(row["value"] > 0 for row in result["rows"])
    assert {"device", "commit", "python", "numpy", "torch"} <= set(result)
    assert status == (0 if all(row["holds"] for row in result["rows"]) else 1)
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:]] == NAMES


def test_a_bound_is_an_upper_or_a_lower_one() -> None:
    def row(value: float, *, at_least: bool) -> host.Row:
        return host.Row(name="x", what="x", value=value, worst=0, unit="", must=2.0, aim=1.0, at_least=at_least)

    assert [row(value, at_least=False).holds for value in (1.9, 2.0, 2.1)] == [True, True, False]
    assert [row(value, at_least=True).holds for value in (1.9, 2.0, 2.1)] == [False, True, True]
