"""`halocline make-model`: a complete checkpoint that the public libraries understand, and never a lost folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from halocline.cli.main import main
from halocline.hal.errors import ConfigError
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.byte_tokenizer import CONTROL_TOKENS, tokenizer_files
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights
from halocline.models.deepseek_v4.presets import TINY, VENDOR_TINY
from halocline.models.weight_plan import Role

INDEX = "model.safetensors.index.json"


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["make-model", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "tiny"
    assert run(folder, "--preset", "tiny", "--seed", "5") == 0
    return folder


def test_it_has_every_file_of_a_release(tiny: Path) -> None:
    assert sorted(content(tiny)) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        INDEX,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert DeepseekV4Config.from_file(tiny) == TINY
    generation = json.loads((tiny / "generation_config.json").read_text())
    assert (generation["do_sample"], generation["temperature"], generation["top_p"]) == (True, 1.0, 1.0)
    index = json.loads((tiny / INDEX).read_text())
    assert (index["metadata"]["total_size"], len(index["weight_map"])) == (1_817_024, 585)
    sizes = [file.stat().st_size for file in tiny.glob("*.safetensors")]
    assert max(sizes) < 1.3 * min(sizes)


def test_the_library_reads_release_names_shapes_and_types(tiny: Path) -> None:
    planned = {entry.name: (entry.shape, entry.dtype.value) for entry in Checkpoint.open(tiny).plan.tensors}
    found: dict[str, Any] = {}
    for file in tiny.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in list(opened.keys()):
                part = opened.get_slice(name)
                found[name] = (tuple(part.get_shape()), part.get_dtype())
    assert found == planned
    assert {dtype for _, dtype in found.values()} == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8", "I64"}


def test_a_seed_decides_every_byte(tiny: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "again", "--seed", "5") == 0
    assert content(tmp_path / "again") == content(tiny)
    assert run(tmp_path / "other", "--seed", "6") == 0
    different = {name for name, data in content(tmp_path / "other").items() if data != content(tiny)[name]}
    assert different == {name for name in content(tiny) if name.startswith("model-")}


def test_one_file_needs_no_index(tmp_path: Path, tiny: Path) -> None:
    assert run(tmp_path / "x", "--seed", "5", "--shards", "1") == 0
    assert {"model.safetensors"} == {name for name in content(tmp_path / "x") if name.startswith("model")}
    assert Checkpoint.open(tmp_path / "x").nbytes == Checkpoint.open(tiny).nbytes


@pytest.mark.parametrize("preset", ["tiny", "vendor-tiny"])
@pytest.mark.parametrize("dialect", ["release", "transformers"])
@pytest.mark.parametrize("weights", ["release", "bfloat16", "float32"])
def test_every_combination_opens_and_reads(tmp_path: Path, preset: str, dialect: str, weights: str) -> None:
    assert run(tmp_path / "x", "--preset", preset, "--dialect", dialect, "--weights", weights) == 0
    checkpoint = Checkpoint.open(tmp_path / "x")
    formats = {"release": {"fp8_block", "mxfp4"}}.get(weights, {weights})
    assert set(checkpoint.formats) == formats
    assert checkpoint.config.num_mtp_layers == int(dialect == "release")
    with CheckpointSource(checkpoint) as source:
        assert len(list(source.everything())) == len(checkpoint.plan.parameters)
        source.finish()


class TestFolders:
    def test_what_is_there_is_kept(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        assert run(tmp_path) == 2
        assert content(tmp_path) == {"thesis.txt": b"years of work"}
        message = capsys.readouterr().err
        assert f"CheckpointError: {tmp_path} is not empty\n  found  thesis.txt" in message
        assert "--force" in message

    def test_force_replaces_an_older_checkpoint_whole(self, tmp_path: Path, tiny: Path) -> None:
        (tmp_path / "notes.txt").write_text("kept")
        assert run(tmp_path, "--force", "--shards", "5", "--preset", "vendor-tiny") == 0
        assert run(tmp_path, "--force", "--seed", "5") == 0
        assert content(tmp_path) == content(tiny) | {"notes.txt": b"kept"}

    def test_an_empty_folder_will_do(self, tmp_path: Path) -> None:
        assert run(tmp_path, "--shards", "1") == 0
        assert Checkpoint.open(tmp_path).config == TINY

    def test_a_file_is_no_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x").write_text("text")
        assert run(tmp_path / "x", "--force") == 2
        assert "is a file" in capsys.readouterr().err

    def test_unknown_preset(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(tmp_path / "x", "--preset", "huge") == 2
        assert "unknown preset 'huge'; known: tiny, vendor-tiny" in capsys.readouterr().err
        assert not (tmp_path / "x").exists()


class TestTokenizer:
    @pytest.mark.parametrize("text", ["", "plain words", "Wörter 你好 🌊\n\ttabs", "".join(map(chr, range(1, 0x250)))])
    def test_any_text_survives(self, tiny: Path, text: str) -> None:
        tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    def test_every_byte_and_every_id_has_its_place(self, tiny: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == TINY.vocab_size
        assert [tokenizer.token_to_id(text) for text in CONTROL_TOKENS] == list(range(len(CONTROL_TOKENS)))
        assert tokenizer.encode("z9").ids == [tokenizer.token_to_id("z"), tokenizer.token_to_id("9")]
        assert tokenizer.encode("he").tokens == ["he"]
        assert all(tokenizer.decode([number], skip_special_tokens=False) for number in range(TINY.vocab_size))

    @pytest.mark.parametrize("config", [TINY, VENDOR_TINY])
    def test_the_recipe_encodes_a_conversation(self, config: DeepseekV4Config) -> None:
        text = json.dumps(tokenizer_files(config)["tokenizer.json"])
        request = recipe.ChatCompletionRequest(
            {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "hi <think>"}]}
        )
        converted = request.convert(recipe.ConversionOptions())
        ids = recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_str(text)).encode(converted.conversation)
        tokenizer = Tokenizer.from_str(text)
        assert ids[0] == 0
        user, assistant = tokenizer.token_to_id("<｜User｜>"), tokenizer.token_to_id("<｜Assistant｜>")
        spoken = ids[ids.index(user) + 1 : ids.index(assistant)]
        assert tokenizer.decode(spoken, skip_special_tokens=False) == "hi <think>"
        assert tokenizer.token_to_id("<think>") not in spoken  # what a user spells is text

    def test_transformers_loads_it(self, tiny: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tiny)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
        assert tokenizer.decode(tokenizer("over the hills").input_ids) == "over the hills"

    def test_a_vocabulary_without_room_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"a vocabulary of at least 271.*\n  found +200"):
            tokenizer_files(TINY.replace(vocab_size=200))


class TestRandomWeights:
    def test_no_vector_is_trivial(self) -> None:
        weights = RandomWeights(TINY, seed=0)
        for parameter in weights.plan.parameters:
            value = weights[parameter.name].float()
            if parameter.role is Role.FLOAT and value.numel() >= 3:
                assert value.std() > 0.04, parameter.name
            if len(parameter.shape) == 1:
                assert value.unique().numel() == value.numel(), parameter.name
            if parameter.name.endswith("norm.weight"):
                assert 0.85 < value.mean() < 1.15, parameter.name

    def test_hash_tables_name_distinct_experts_and_use_all(self) -> None:
        table = RandomWeights(TINY, seed=0)["layers.1.ffn.gate.tid2eid"]
        assert table.dtype == torch.int64
        assert all(len(set(row)) == 3 for row in table.tolist())
        assert sorted(set(table.flatten().tolist())) == list(range(8))

    def test_a_parameter_depends_on_seed_and_name_alone(self) -> None:
        name = "layers.0.attn.wkv.weight"
        first, again = RandomWeights(TINY, seed=1)[name], RandomWeights(TINY.without_draft(), seed=1)[name]
        assert torch.equal(first, again)
        assert not torch.equal(first, RandomWeights(TINY, seed=2)[name])
        assert not torch.equal(first, RandomWeights(TINY, seed=1)["layers.1.attn.wkv.weight"])


def test_the_first_layers_of_a_preset_drawn_on_this_machines_device(tmp_path: Path) -> None:
    """Draft layers are left out; on a CPU the numbers are those of the same seed without the option."""
    assert run(tmp_path / "a", "--preset", "tiny", "--layers", "3", "--on-device") == 0
    assert run(tmp_path / "b", "--preset", "tiny", "--layers", "3") == 0
    config = DeepseekV4Config.from_file(tmp_path / "a")
    assert (config.compress_ratios, config.num_mtp_layers) == ((0, 4, 128), 0)
    if not torch.cuda.is_available():
        assert content(tmp_path / "a") == content(tmp_path / "b")
    assert Checkpoint.open(tmp_path / "a").nbytes == Checkpoint.open(tmp_path / "b").nbytes
