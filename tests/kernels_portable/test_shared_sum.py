"""The sum over ranks that read each other's memory, by real processes that share some; the kernel is interpreted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("shared_sum_ranks.py")


def run(tmp_path: Path, ranks: int, *words: str) -> list[dict[str, np.ndarray]]:
    """What each of so many ranks found, by name."""
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(ranks), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [dict(np.load(tmp_path / f"found-{rank}.npz")) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_many_calls(tmp_path: Path, ranks: int) -> None:
    """Calls of all sizes one after the other, with ranks that are late in turn, against sums in float64."""
    found = run(tmp_path, ranks, "calls")
    names = [name for name in found[0] if name.startswith("sum")]
    assert len(names) == 40
    for name in names:
        parts = [one[name.replace("sum", "part")] for one in found]
        exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
        slack = 2**-7 if "bfloat16" in name else 2**-22  # the interpreter cuts bfloat16 off
        np.testing.assert_allclose(found[0][name], exact, rtol=slack, atol=slack)
        for one in found[1:]:
            np.testing.assert_array_equal(one[name], found[0][name], err_msg="not the same bits on every rank")


def test_numbers_of_calls_may_pass_the_largest_one(tmp_path: Path) -> None:
    found = run(tmp_path, 2, "calls", "--first", str(2**31 - 7))
    for name in (name for name in found[0] if name.startswith("sum")):
        exact = sum(one[name.replace("sum", "part")].astype(np.float64) for one in found)
        np.testing.assert_allclose(found[0][name], exact, rtol=2**-7, atol=2**-7)


def test_a_rank_that_waits_in_vain_gives_no_number(tmp_path: Path) -> None:
    found = run(tmp_path, 2, "alone")
    assert np.isnan(found[0]["sum"]).all()
