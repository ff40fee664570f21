"""The format of each matrix follows from its own tensors, whatever config.json says: FP8, packed FP4, NVFP4, plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halocline.hal.errors import CheckpointError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.weight_codecs import dequantize, quantize_weight
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights, make_checkpoint, write_checkpoint
from halocline.models.deepseek_v4.presets import TINY, VENDOR_TINY

Rewrite = Callable[[Path, Callable[[dict[str, Tensor]], None]], None]
EXPERTS = "layers.3.ffn.experts"
NAMES = [f"{EXPERTS}.{expert}.{part}" for expert in range(8) for part in ("w1", "w2", "w3")]


def read_all(folder: Path) -> dict[str, Weight | Tensor]:
    with CheckpointSource(Checkpoint.open(folder)) as source:
        found = dict(source.everything())
        source.finish()
    return found


def values(folder: Path) -> dict[str, Tensor]:
    """Every parameter as the floats it stands for."""
    return {name: dequantize(value) if isinstance(value, Weight) else value for name, value in read_all(folder).items()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert different == []


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
def test_scales_by_their_other_names(folder: Path, pristine: Path, rewrite: Rewrite, suffix: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name.removesuffix("scale") + suffix] = tensors.pop(name)

    rewrite(folder, change)
    equal(values(folder), values(pristine))


def test_packed_fp4_in_unsigned_bytes(folder: Path, pristine: Path, rewrite: Rewrite) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in NAMES:
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].view(torch.uint8)

    rewrite(folder, change)
    equal(values(folder), values(pristine))


def test_fp8_experts_with_float32_scales_as_in_base_checkpoints(folder: Path, rewrite: Rewrite) -> None:
    expected: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for seed, name in enumerate(NAMES):
            shape = (64, 32) if name.endswith("w2") else (32, 64)
            codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
            scale = torch.full((1, 1), 0.013 * (seed + 1))
            tensors |= {f"{name}.weight": codes.view(torch.float8_e4m3fn), f"{name}.scale": scale}
            expected[name] = codes.view(torch.float8_e4m3fn).float() * scale

    rewrite(folder, change)
    found = values(folder)
    assert Checkpoint.open(folder).formats == {"fp8_block": 60 + 24, "mxfp4": 168 - 24}
    for name in NAMES:
        assert torch.equal(found[f"{name}.weight"], expected[name])


def test_bfloat16_experts_under_a_config_that_says_fp4(folder: Path, rewrite: Rewrite) -> None:
    plain = {name: torch.randn(64, 32) if name.endswith("w2") else torch.randn(32, 64) for name in NAMES}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in NAMES:
            tensors[f"{name}.weight"] = plain[name].bfloat16()
            del tensors[f"{name}.scale"]

    rewrite(folder, change)
    found = read_all(folder)
    for name in NAMES:
        weight = found[f"{name}.weight"]
        assert isinstance(weight, Weight)
        assert (weight.format, weight.scale) == (WeightFormat.BFLOAT16, None)
        assert torch.equal(dequantize(weight), plain[name].bfloat16().float())


def test_float32_vectors_stay_float32_even_from_bfloat16(folder: Path, rewrite: Rewrite) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.attn.attn_sink"] = tensors["layers.0.attn.attn_sink"].bfloat16()
        tensors["layers.0.attn_norm.weight"] = tensors["layers.0.attn_norm.weight"].float()

    rewrite(folder, change)
    found = values(folder)
    assert found["layers.0.attn.attn_sink"].dtype == torch.float32
    assert found["layers.0.attn_norm.weight"].dtype == torch.float32  # a plain tensor comes as it is stored


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvfp4") / "tiny"
    make_checkpoint(folder, TINY.replace(expert_dtype="nvfp4"), seed=3)
    return folder


class TestNvfp4:
    def test_its_three_tensors_give_the_quantised_values(self, nvfp4: Path) -> None:
        source, found = RandomWeights(TINY, seed=3), values(nvfp4)
        assert Checkpoint.open(nvfp4).formats == {"fp8_block": 60, "nvfp4": 168}
        for name in NAMES:
            expected = dequantize(quantize_weight(source[f"{name}.weight"], WeightFormat.NVFP4))
            assert torch.equal(found[f"{name}.weight"], expected)

    def test_scalars_of_shape_one_and_no_input_scale(self, nvfp4: Path, tmp_path: Path, rewrite: Rewrite) -> None:
        folder = tmp_path / "tiny"
        make_checkpoint(folder, TINY.replace(expert_dtype="nvfp4"), seed=3)

        def change(tensors: dict[str, Tensor]) -> None:
            for name in NAMES:
                tensors[f"{name}.weight_scale_2"] = tensors[f"{name}.weight_scale_2"].reshape(1)
                del tensors[f"{name}.input_scale"]

        rewrite(folder, change)
        equal(values(folder), values(nvfp4))

    @pytest.mark.parametrize(
        ("suffix", "message"),
        [
            ("weight_scale", rf"missing scale +of {NAMES[0]}.weight in model.safetensors, stored as U8"),
            ("weight_scale_2", rf"missing scale +global scale of {NAMES[0]}.weight in model.safetensors"),
        ],
    )
    def test_a_missing_scale_is_never_one(self, tmp_path: Path, rewrite: Rewrite, suffix: str, message: str) -> None:
        make_checkpoint(tmp_path / "tiny", TINY.replace(expert_dtype="nvfp4"), seed=3)
        rewrite(tmp_path / "tiny", lambda tensors: tensors.__delitem__(f"{NAMES[0]}.{suffix}"))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path / "tiny")

    def test_a_stack_of_two_parts_keeps_two_global_scales(self, nvfp4: Path) -> None:
        found = values(nvfp4)
        with CheckpointSource(Checkpoint.open(nvfp4)) as source:
            stack = source.experts(EXPERTS, ("w1", "w3"), 8)
        assert stack.global_scale is not None
        assert stack.global_scale.shape == (8, 2)
        joined = [torch.cat([found[f"{EXPERTS}.{e}.w1.weight"], found[f"{EXPERTS}.{e}.w3.weight"]]) for e in range(8)]
        assert torch.equal(dequantize(stack), torch.stack(joined))


class TestExpertStacks:
    @pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "nvfp4", "bfloat16", "float32"])
    def test_stacks_hold_what_the_matrices_hold(self, tmp_path: Path, expert_dtype: str) -> None:
        config = VENDOR_TINY.replace(
            num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0, expert_dtype=expert_dtype
        )
        make_checkpoint(tmp_path / "one", config, seed=1, num_shards=2)
        single = values(tmp_path / "one")
        with CheckpointSource(Checkpoint.open(tmp_path / "one")) as source:
            gate_up = source.experts("layers.0.ffn.experts", ("w1", "w3"), 8)
            down = source.experts("layers.0.ffn.experts", ("w2",), 8)
        assert gate_up.shape == (8, 256, 256)
        assert down.shape == (8, 256, 128)
        for expert in range(8):
            w1, w2, w3 = (single[f"layers.0.ffn.experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
            assert torch.equal(dequantize(gate_up)[expert], torch.cat((w1, w3)))
            assert torch.equal(dequantize(down)[expert], w2)
        if down.global_scale is not None:
            assert down.global_scale.shape == (8,)

    def test_one_layer_has_one_format(self, folder: Path, rewrite: Rewrite) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            del tensors[f"{EXPERTS}.5.w3.scale"]
            tensors[f"{EXPERTS}.5.w3.weight"] = torch.zeros(32, 64, dtype=torch.bfloat16)

        rewrite(folder, change)
        with (
            CheckpointSource(Checkpoint.open(folder)) as source,
            pytest.raises(CheckpointError, match=rf"different formats\n.*{EXPERTS}\.5\.w3\.weight as"),
        ):
            source.experts(EXPERTS, ("w1", "w3"), 8)

    def test_fp8_blocks_may_not_span_two_matrices(self, folder: Path, rewrite: Rewrite) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            for name in NAMES:
                shape = (64, 32) if name.endswith("w2") else (32, 64)
                tensors[f"{name}.weight"] = torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
                tensors[f"{name}.scale"] = torch.ones(1, 1)

        rewrite(folder, change)
        with CheckpointSource(Checkpoint.open(folder)) as source:
            assert source.experts(EXPERTS, ("w2",), 8).format is WeightFormat.FP8_BLOCK
            with pytest.raises(CheckpointError, match="32 rows of FP8 cannot be joined"):
                source.experts(EXPERTS, ("w1", "w3"), 8)


def test_derivatives_that_copy_embedding_and_head_into_draft_layers(
    folder: Path, pristine: Path, rewrite: Rewrite
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("embed", "emb.tok_emb", "embed_tokens"):
            tensors[f"mtp.0.{name}.weight"] = tensors["embed.weight"]
        for name in ("head", "shared_head.head"):
            tensors[f"mtp.0.{name}.weight"] = tensors["head.weight"]

    rewrite(folder, change)
    equal(values(folder), values(pristine))


class TestWriting:
    def test_what_is_written_is_complete(self, tmp_path: Path) -> None:
        weights = dict(RandomWeights(TINY, seed=0))
        del weights["layers.0.attn.attn_sink"]
        weights["layers.0.attn.sinks"] = torch.zeros(8)
        with pytest.raises(CheckpointError, match=r"1 missing, 1 more\n.*attn_sink\n.*sinks"):
            write_checkpoint(tmp_path / "x", TINY, weights)

    def test_shapes_are_checked(self, tmp_path: Path) -> None:
        weights = dict(RandomWeights(TINY, seed=0)) | {"layers.0.attn.attn_sink": torch.zeros(4)}
        with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.attn_sink: .* \[4\], expected \[8\]"):
            write_checkpoint(tmp_path / "x", TINY, weights)
        assert not (tmp_path / "x" / "config.json").exists()  # an unfinished folder is no checkpoint

    def test_float32_survives_unchanged(self, tmp_path: Path) -> None:
        weights = dict(RandomWeights(TINY, seed=0))
        write_checkpoint(tmp_path / "x", TINY.unquantized("float32"), weights, num_shards=4)
        assert len(list((tmp_path / "x").glob("*.safetensors"))) == 4
        equal(values(tmp_path / "x"), weights)
