"""The release holds what training computed with, and reads back as a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from halocline.engine.tokenizer import Tokenizer
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.weight_codecs import dequantize
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.checkpoint_writer import write_json
from halocline.models.config_file import read_json_object
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.training.parameters import TrainedSource, initial_parameters
from halocline.training.release import main, release
from halocline.training.state import load_weights, save_state

CONFIG = TINY.replace(vocab_size=1024, hidden_size=128, moe_intermediate_size=64)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    parameters = initial_parameters(CONFIG, seed=3, device="cpu")
    save_state(folder, parameters, AdamW([parameters["head.weight"]]), step=7)
    return folder


@pytest.fixture
def model(tmp_path: Path, graded: Path) -> Path:
    """A folder as it is before its weights are released: configuration and tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", CONFIG.to_dict())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(graded / name, folder / name)
    return folder


def _everything(folder: Path) -> dict[str, Weight | torch.Tensor]:
    with CheckpointSource(Checkpoint.open(folder)) as source:
        return dict(source.everything())


def test_released_matrices_are_those_of_the_quantised_forward(state: Path, model: Path) -> None:
    released = release(state, model)
    assert set(released.formats) == {"fp8_block", "mxfp4"}
    formats = {p.name: p.format for p in plan_weights(CONFIG).parameters if p.format is not None}
    weights = {name: value.float() for name, value in load_weights(state).items() if value.is_floating_point()}
    trained = TrainedSource(parameters=weights, formats=formats, quantized=True)
    stored = {name: value for name, value in _everything(model).items() if isinstance(value, Weight)}
    for name, value in stored.items():
        if value.format in (WeightFormat.FP8_BLOCK, WeightFormat.MXFP4):
            expected = trained.matrix(name.removesuffix(".weight")).data
            torch.testing.assert_close(dequantize(value, torch.float32), expected, atol=0, rtol=0)


def test_the_release_leaves_configuration_and_tokenizer_as_they_were(state: Path, model: Path) -> None:
    before = read_json_object(model / "config.json")
    release(state, model)
    assert read_json_object(model / "config.json") == before
    assert Tokenizer.from_dir(model).vocab_size <= CONFIG.vocab_size


def test_a_plain_release_keeps_the_weights_of_the_state(state: Path, model: Path, tmp_path: Path) -> None:
    arguments = ["--state", state, "--model", model, "--plain"]
    with pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    main([str(argument) for argument in (*arguments, "--out", tmp_path / "plain")])
    stored = _everything(tmp_path / "plain")["layers.1.attn.wkv.weight"]
    assert isinstance(stored, Weight)
    assert stored.format is WeightFormat.BFLOAT16
    assert torch.equal(stored.data, load_weights(state)["layers.1.attn.wkv.weight"])
