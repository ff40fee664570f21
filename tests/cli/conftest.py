"""A tiny checkpoint for commands that load one, and the command line in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halocline.cli import main
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    make_checkpoint(folder, preset("tiny"), seed=1, num_shards=3)
    return folder


@pytest.fixture
def halocline() -> Iterator[Callable[..., int]]:
    """Runs the command line and gives its exit status; puts the process's logging back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("halocline")
    handlers, levels = list(root.handlers), (root.level, ours.level)

    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as stop:
            main.main([str(argument) for argument in arguments])
        return int(stop.value.code or 0)

    yield run
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)
