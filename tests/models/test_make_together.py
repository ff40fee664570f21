"""A checkpoint written by several processes: the values of one that a single process writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halocline.hal.errors import CheckpointError
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_writer import shard_runs
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.make_together import make_together
from halocline.models.deepseek_v4.presets import preset
from halocline.models.deepseek_v4.weight_plan import plan_weights


def bytes_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {name: tensor.contiguous().view(torch.uint8) for name, tensor in load_file(path).items()}
    return found


def test_it_does_not_matter_who_writes(tmp_path: Path) -> None:
    config = preset("tiny")
    make_checkpoint(tmp_path / "one", config, seed=3, num_shards=2)
    make_together(tmp_path / "many", config, seed=3, num_shards=5, num_workers=2)
    one, many = bytes_of(tmp_path / "one"), bytes_of(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(tensor, many[name]) for name, tensor in one.items())
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "one" / name).read_text()) == json.loads((tmp_path / "many" / name).read_text())
    checkpoint = Checkpoint.open(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 5
    assert checkpoint.nbytes == Checkpoint.open(tmp_path / "one").nbytes


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(CheckpointError, match="not empty"):
        make_together(tmp_path, preset("tiny"), seed=0, num_shards=1, num_workers=1)


@pytest.mark.parametrize("num_shards", [1, 2, 7, 10_000])
def test_files_are_of_about_equal_size_and_hold_everything_once(num_shards: int) -> None:
    plan = plan_weights(preset("tiny"))
    runs = shard_runs(plan, num_shards)
    assert [parameter for run in runs for parameter in run] == list(plan.parameters)
    assert len(runs) <= num_shards
    assert all(runs)
