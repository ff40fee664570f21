"""Ranks for the tests of this folder: four processes, started once for each file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # importlib mode leaves test folders out
    sys.path.insert(0, str(HERE))

from rank_world import RankWorld  # noqa: E402


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    """Four processes; a test runs its tasks on as many of them as its world has ranks."""
    world = RankWorld(4, tmp_path_factory.mktemp("ranks"))
    yield world
    world.close()
