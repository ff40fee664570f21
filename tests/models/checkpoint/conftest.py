"""A small checkpoint on disk, and ways to look into a copy of it and to damage it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import TINY


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset in three shards; tests do not write there."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, TINY, seed=3, num_shards=3)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.fixture(scope="session")
def all_tensors() -> Callable[[Path], dict[str, Tensor]]:
    """Every tensor of every shard, read by the safetensors library."""
    return _all_tensors


@pytest.fixture(scope="session")
def rewrite() -> Callable[[Path, Callable[[dict[str, Tensor]], None]], None]:
    """Applies a change to the tensors of a folder and writes them back as one file without an index."""

    def apply(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
        tensors = _all_tensors(folder)
        for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
            file.unlink(missing_ok=True)
        change(tensors)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")

    return apply
