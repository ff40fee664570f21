"""Sums through shared memory by two real processes, and what they do where they cannot share any."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halocline.backends_cuda.collective_symm_mem import (
    _obstacle,
    _Place,
    _refusal,
    all_reduce_symm_mem,
    most_bytes,
)
from halocline.hal.process_group import ALONE, TorchGroup

SCRIPT = Path(__file__).with_name("symm_mem_ranks.py")


def run(tmp_path: Path, task: str) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), task], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]


def check(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert len(one["sums"]) == 13
        assert [row for row in one["sums"] if not row[2]] == []
        assert all(shape == [1, size] for kind, size, _, shape in one["sums"] if kind.startswith("torch."))


def test_sums_of_every_size_and_type(tmp_path: Path) -> None:
    """One allocation serves all of them; what is too large or of another type goes the other way."""
    found = run(tmp_path, "sums")
    check(found)
    assert [one["calls"] for one in found] == [["empty", "rendezvous"]] * 2
    assert [one["said"] for one in found] == [[], []]


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("gloo", "rank 0: its tensors are on cpu"),
        ("hosts", "rank 0: the ranks are on 2 hosts"),
        ("apart", "rank 0: sums are wrong in trial 1 of 1: nan instead of 3.0"),
    ],
)
def test_without_shared_memory_one_line_says_why(tmp_path: Path, task: str, reason: str) -> None:
    found = run(tmp_path, task)
    check(found)
    assert found[0]["said"] == [f"2 ranks share no memory, so that small sums go through NCCL: {reason}"]
    assert found[1]["said"] == []
    assert found[0]["calls"] == (["empty", "rendezvous"] if task == "apart" else [])


# ---- reasons --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "device", "reason"),
    [
        ("nccl", 2, "cuda:1", ""),
        ("nccl", 9, "cuda:0", "9 ranks, of at most 8"),
        ("gloo", 2, "cuda:0", "its group is one of gloo"),
        ("gloo", 2, "cpu", "its tensors are on cpu"),
    ],
)
def test_a_rank_knows_what_speaks_against_it(
    monkeypatch: pytest.MonkeyPatch, name: str, size: int, device: str, reason: str
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: name)
    assert _refusal(TorchGroup(size), torch.device(device)) == reason


def test_places_that_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {(0, 1), (1, 0), (2, 0), (0, 3)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) in seen)
    assert _obstacle([_Place("a", 0, ""), _Place("a", 1, "")], 1) == ""
    assert _obstacle([_Place("a", 0, ""), _Place("b", 1, "")], 1) == "the ranks are on 2 hosts"
    assert _obstacle([_Place("a", 0, ""), _Place("a", 0, "")], 1) == "ranks see their devices under the same number"
    three = [_Place("a", 0, ""), _Place("a", 1, ""), _Place("a", 2, "")]
    assert _obstacle(three, 2) == "device 2 does not see the memory of [1]"
    assert _obstacle([_Place("a", 0, ""), _Place("a", 3, "")], 0) == "device 0 does not see the memory of [3]"
    assert _obstacle([_Place("a", 0, "no"), _Place("a", 1, "")], 1) == "", "the other rank says it"


def test_one_rank_has_nobody_to_meet() -> None:
    x = torch.ones(2, 3)
    assert all_reduce_symm_mem(x, ALONE) is x


def test_more_ranks_share_smaller_tensors() -> None:
    """A rank reads all that the others have: never more than a mebibyte; 128 rows of 4096 are the most of two."""
    assert most_bytes(2) == 128 * 4096 * 2
    for ranks in range(2, 9):
        assert (ranks - 1) * most_bytes(ranks) <= 1 << 20 < (ranks - 1) * (most_bytes(ranks) + 8192)
