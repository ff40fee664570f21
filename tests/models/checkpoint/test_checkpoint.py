"""Every way in which files, index and configuration can disagree is an error that names file and tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halocline.hal.errors import CheckpointError, ConfigError, HaloclineError
from halocline.hal.formats import Weight
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import TINY

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
SINK = "layers.0.attn.attn_sink"
WQ_A = "layers.0.attn.wq_a"
EXPERT = "layers.3.ffn.experts.4.w2"


def refused(folder: Path, *patterns: str, kind: type[HaloclineError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, message), message
    assert "\n  try" in message
    return message


def test_a_sound_checkpoint_opens_and_reads_completely(
    pristine: Path, all_tensors: Callable[[Path], dict[str, Tensor]]
) -> None:
    checkpoint = Checkpoint.open(pristine)
    stored = all_tensors(pristine)
    assert checkpoint.config == TINY
    assert checkpoint.nbytes == checkpoint.plan.nbytes == 1_817_024
    assert checkpoint.formats == {"fp8_block": 60, "mxfp4": 168}
    draft = sum(t.numel() * t.element_size() for name, t in stored.items() if name.startswith("mtp."))
    assert checkpoint.nbytes_without("mtp.") == 1_817_024 - draft
    seen = 0
    reports: list[tuple[int, int]] = []
    with CheckpointSource(checkpoint, progress=lambda done, total: reports.append((done, total))) as source:
        for name, value in source.everything():
            if isinstance(value, Weight):
                assert value.scale is not None
                parts = {name: value.data, name.removesuffix("weight") + "scale": value.scale}
            else:
                parts = {name: value}
            for key, part in parts.items():
                assert torch.equal(part.view(torch.uint8), stored[key].view(torch.uint8)), key
                seen += 1
        source.finish()
    assert seen == len(stored) == 585
    assert reports[-1] == (1_817_024, 1_817_024)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


class TestFilesAndIndex:
    def test_no_such_folder(self, tmp_path: Path) -> None:
        refused(tmp_path / "nowhere", r"no such model: .*/nowhere", kind=ConfigError)

    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        refused(folder, r"no config.json in .*/tiny", kind=ConfigError)

    def test_a_file_instead_of_a_folder(self, folder: Path) -> None:
        refused(folder / "config.json", r"config.json is not a folder")

    def test_no_weights(self, folder: Path) -> None:
        for file in (*folder.glob("*.safetensors"), folder / INDEX):
            file.unlink()
        refused(folder, r"no weights in .*/tiny", "found +config.json, generation_config.json, tokenizer.json")

    def test_missing_shard(self, folder: Path) -> None:
        (folder / SECOND).unlink()
        refused(folder, "1 of 3 checkpoint file.s. missing", f"asked +{SECOND}")

    def test_missing_shard_without_an_index(self, folder: Path) -> None:
        (folder / INDEX).unlink()
        (folder / SECOND).unlink()
        refused(folder, r"do not fit config.json \(\d+ missing", r"and \d+ more")

    @pytest.mark.parametrize("cut", [1, 4096])
    def test_truncated_shard(self, folder: Path, cut: int) -> None:
        size = (folder / SECOND).stat().st_size
        os.truncate(folder / SECOND, size - cut)
        refused(
            folder, rf"damaged checkpoint file .*{SECOND}", rf"truncated: .* {size} bytes, the file has {size - cut}\n"
        )

    @pytest.mark.parametrize("size", [0, 5, 100])
    def test_shard_cut_inside_its_header(self, folder: Path, size: int) -> None:
        os.truncate(folder / SECOND, size)
        refused(folder, rf"damaged checkpoint file .*{SECOND}", "does not fit a file of")

    def test_shard_that_is_too_long(self, folder: Path) -> None:
        with (folder / FIRST).open("ab") as file:
            file.write(b"\0\0")
        refused(folder, rf"damaged checkpoint file .*{FIRST}", "longer than it should be")

    def test_header_that_is_no_json(self, folder: Path) -> None:
        content = bytearray((folder / FIRST).read_bytes())
        content[8] = ord("?")
        (folder / FIRST).write_bytes(content)
        refused(folder, rf"damaged checkpoint file .*{FIRST}", "its header is not JSON")

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"tensor x: F32 \[2\] does not take bytes 0 to 4"),
            ({"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}, "entry of tensor x is malformed"),
            ({"dtype": "F32", "shape": [1]}, "entry of tensor x is malformed"),
            ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, r"tensor x begins at byte \d+, expected"),
        ],
    )
    def test_header_that_contradicts_itself(self, folder: Path, entry: dict[str, object], message: str) -> None:
        header = json.dumps({"x": entry}).encode()
        (folder / "model-extra.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        (folder / INDEX).unlink()
        refused(folder, "damaged checkpoint file .*model-extra.safetensors", message)

    def test_broken_index(self, folder: Path) -> None:
        (folder / INDEX).write_text("{]")
        refused(folder, rf"{INDEX} is not valid JSON", kind=ConfigError)
        (folder / INDEX).write_text('{"weight_map": [1]}')
        refused(folder, rf"{INDEX} has no weight_map")

    def test_index_lists_what_no_file_has(self, folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["layers.0.attn.ghost"] = FIRST
        (folder / INDEX).write_text(json.dumps(index))
        refused(folder, r"1 tensor\(s\) listed but absent, 0 unlisted", rf"absent +layers.0.attn.ghost in {FIRST}")

    def test_index_that_does_not_list_a_tensor(self, folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        file = index["weight_map"].pop(SINK)
        (folder / INDEX).write_text(json.dumps(index))
        refused(folder, r"0 tensor\(s\) listed but absent, 1 unlisted", rf"unlisted +{SINK} in {file}")

    def test_index_that_names_the_wrong_file(self, folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][SINK] = "model-00003-of-00003.safetensors"
        (folder / INDEX).write_text(json.dumps(index))
        refused(folder, r"1 tensor\(s\) listed but absent, 1 unlisted", SINK)

    def test_file_that_no_index_lists(self, folder: Path) -> None:
        shutil.copy(folder / FIRST, folder / "old.safetensors")
        refused(folder, rf"1 file\(s\) in .* that {INDEX} does not list", "found +old.safetensors")


def _pop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def _set(name: str, value: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors)})


CONTENT: list[tuple[str, Callable[[dict[str, Tensor]], None], str]] = [
    ("missing parameter", _pop(SINK), rf"\(1 missing\)\n  missing  {SINK}\n"),
    ("missing table", _pop("layers.0.ffn.gate.tid2eid"), r"missing +layers.0.ffn.gate.tid2eid"),
    (
        "missing scale",
        _pop(WQ_A + ".scale"),
        rf"\(1 missing scale\)\n.*of {WQ_A}.weight in model.safetensors, stored as F8",
    ),
    ("missing FP4 scale", _pop(EXPERT + ".scale"), rf"missing scale +of {EXPERT}.weight in .*, stored as I8"),
    ("scale alone", _pop(WQ_A + ".weight"), rf"missing +{WQ_A}.weight \(its scale is {WQ_A}.scale in model.saf"),
    (
        "unknown",
        _set("layers.0.attn.w_extra.weight", lambda t: t[SINK] + 1),
        "unknown +layers.0.attn.w_extra.weight in ",
    ),
    (
        "a layer too many",
        _set("layers.6.attn.attn_sink", lambda t: t[SINK] + 1),
        "unknown +layers.6.attn.attn_sink in ",
    ),
    ("draft layer too many", _set("mtp.1.norm.weight", lambda t: t["mtp.0.norm.weight"]), "unknown +mtp.1.norm.weight"),
    (
        "wrong shape",
        _set(SINK, lambda t: t[SINK][:4]),
        rf"wrong shape +{SINK} in model.safetensors: \[4\], expected \[8\]",
    ),
    (
        "wrong scale shape",
        _set(
            EXPERT + ".scale",
            lambda t: torch.cat([t[EXPERT + ".scale"].view(torch.uint8)] * 2, dim=1).view(torch.float8_e8m0fnu),
        ),
        rf"wrong shape +{EXPERT}.scale in model.safetensors: \[64, 2\], expected \[64, 1\]",
    ),
    (
        "unpacked FP4",
        _set(EXPERT + ".weight", lambda t: torch.cat([t[EXPERT + ".weight"]] * 2, dim=1)),
        rf"wrong shape +{EXPERT}.weight in model.safetensors: \[64, 32\], expected \[64, 16\]",
    ),
    ("wrong dtype", _set(SINK, lambda t: t[SINK].half()), rf"wrong dtype +{SINK} in .*: F16, expected F32, BF16"),
    (
        "float table",
        _set("layers.1.ffn.gate.tid2eid", lambda t: t["layers.1.ffn.gate.tid2eid"].float()),
        "F32, expected I64",
    ),
    (
        "matrix of F16",
        _set(WQ_A + ".weight", lambda t: t[WQ_A + ".weight"].half()),
        r"F16, expected F32, BF16, F8_E4M3, I8 or",
    ),
    ("scale of BF16", _set(WQ_A + ".scale", lambda t: t[WQ_A + ".scale"].bfloat16()), "BF16, expected F8_E8M0, F32"),
    (
        "scale of U8",
        _set(EXPERT + ".scale", lambda t: t[EXPERT + ".scale"].view(torch.uint8)),
        rf"{EXPERT}.scale in .*: U8",
    ),
    (
        "scale of a plain matrix",
        _set(WQ_A + ".weight", lambda t: t[WQ_A + ".weight"].bfloat16()),
        rf"unknown +{WQ_A}.scale in .*: its matrix has no use for a scale \(BF16\)",
    ),
    (
        "scale of a norm",
        _set("layers.0.attn_norm.scale", lambda t: torch.ones(1)),
        "unknown +layers.0.attn_norm.scale in .*: its matrix has no use for a scale",
    ),
    (
        "one parameter under two names",
        _set("model.layers.0.self_attn.sinks", lambda t: t[SINK] + 1),
        rf"twice +data of {SINK}: .*{SINK} in model.safetensors",
    ),
]


@pytest.mark.parametrize(("change", "pattern"), [case[1:] for case in CONTENT], ids=[case[0] for case in CONTENT])
def test_content_that_does_not_fit(
    folder: Path, rewrite: Callable[..., None], change: Callable[[dict[str, Tensor]], None], pattern: str
) -> None:
    rewrite(folder, change)
    message = refused(folder, pattern)
    assert message.startswith(f"{folder}: the files do not fit config.json (1 ")


def test_all_problems_are_counted_and_the_first_of_each_kind_listed(folder: Path, rewrite: Callable[..., None]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for expert in range(8):
            del tensors[f"layers.3.ffn.experts.{expert}.w1.scale"]
        del tensors[SINK]

    rewrite(folder, change)
    message = refused(folder, r"\(1 missing, 8 missing scale\)", "and 4 more")
    assert message.count("layers.3.ffn.experts") == 4


def test_another_models_config_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_routed_experts": 16}))
    refused(
        folder,
        r"\(12 wrong shape, 168 missing\)",
        r"wrong shape +layers.0.ffn.gate.weight in .*: \[8, 64\], expected \[16, 64\]",
    )


class TestReading:
    def test_whatever_is_left_behind_is_an_error(self, pristine: Path) -> None:
        with CheckpointSource(Checkpoint.open(pristine)) as source:
            for name, _ in source.everything():
                if name == "layers.5.ffn.gate.weight":
                    break
            with pytest.raises(
                CheckpointError, match=r"\d+ of 357 parameters of .* were not loaded\n  found  hc_head_base, "
            ):
                source.finish()

    def test_parts_that_were_not_built_may_stay(self, pristine: Path) -> None:
        with CheckpointSource(Checkpoint.open(pristine)) as source:
            names = [name for name, _ in source.everything(without_prefixes=("mtp.",))]
            assert not any(name.startswith("mtp.") for name in names)
            source.finish(without_prefixes=("mtp.",))
            with pytest.raises(CheckpointError, match=r"\d+ of 357 parameters .*\n  found  mtp.0"):
                source.finish()

    def test_asking_twice_or_for_nothing_is_an_error(self, pristine: Path) -> None:
        with CheckpointSource(Checkpoint.open(pristine)) as source:
            source.tensor(SINK)
            with pytest.raises(CheckpointError, match="asked for twice"):
                source.tensor(SINK)
            with pytest.raises(CheckpointError, match=r"has no parameter layers\.9\.attn\.attn_sink"):
                source.tensor("layers.9.attn.attn_sink")
            with pytest.raises(CheckpointError, match="is a matrix with a format"):
                source.tensor(WQ_A + ".weight")

    def test_a_file_that_shrinks_after_the_check(self, folder: Path) -> None:
        checkpoint = Checkpoint.open(folder)
        for file in folder.glob("*.safetensors"):
            os.truncate(file, 20_000)
        with (
            CheckpointSource(checkpoint) as source,
            pytest.raises(CheckpointError, match=r"cannot read tensor \S+ from .*\n.*the file ends after"),
        ):
            list(source.everything())

    def test_memory_peaks_at_one_tensor(self, tmp_path: Path) -> None:
        """Reads 77 MB whose largest tensor is 32 MB, keeping nothing: resident memory may grow by one tensor."""
        config = TINY.replace(hidden_size=512, vocab_size=32768)
        make_checkpoint(tmp_path / "wide", config, seed=0)
        code = (
            "import sys\n"
            "import torch\n"
            "from pathlib import Path\n"
            "from halocline.models.checkpoint import Checkpoint\n"
            "from halocline.models.checkpoint_source import CheckpointSource\n"
            "def status(key):\n"
            "    lines = Path('/proc/self/status').read_text().splitlines()\n"
            "    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024\n"
            "checkpoint = Checkpoint.open(sys.argv[1])\n"
            "source = CheckpointSource(checkpoint)\n"
            "Path('/proc/self/clear_refs').write_text('5')\n"
            "before = status('VmRSS')\n"
            "for name, value in source.everything():\n"
            "    del value\n"
            "print(checkpoint.nbytes, status('VmHWM') - before)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "wide")], capture_output=True, text=True, check=True
        )
        total, grown = map(int, done.stdout.split())
        assert total > 75_000_000
        assert grown < 33_554_432 + 8_000_000
