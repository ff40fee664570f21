"""One set of weights through files of both dialects, in both directions between Transformers and us."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import Weight
from halocline.hal.weight_codecs import dequantize
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights, make_checkpoint, write_checkpoint
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.deepseek_v4.weights import resolve_name, transformers_name

FLOAT32 = TINY.without_draft().unquantized("float32")

# Names of some parameters in Transformers, typed in from its modules.
THEIR_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_scale": "model.hc_head.hc_scale",
    "layers.1.hc_attn_fn": "model.layers.1.attn_hc.fn",
    "layers.1.hc_ffn_base": "model.layers.1.ffn_hc.base",
    "layers.1.hc_ffn_scale": "model.layers.1.ffn_hc.scale",
    "layers.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "layers.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    "layers.1.attn.attn_sink": "model.layers.1.self_attn.sinks",
    "layers.1.attn.wq_a.weight": "model.layers.1.self_attn.q_a_proj.weight",
    "layers.1.attn.q_norm.weight": "model.layers.1.self_attn.q_a_norm.weight",
    "layers.1.attn.wq_b.weight": "model.layers.1.self_attn.q_b_proj.weight",
    "layers.1.attn.wkv.weight": "model.layers.1.self_attn.kv_proj.weight",
    "layers.1.attn.kv_norm.weight": "model.layers.1.self_attn.kv_norm.weight",
    "layers.1.attn.wo_a.weight": "model.layers.1.self_attn.o_a_proj.weight",
    "layers.1.attn.wo_b.weight": "model.layers.1.self_attn.o_b_proj.weight",
    "layers.1.attn.compressor.wkv.weight": "model.layers.1.self_attn.compressor.kv_proj.weight",
    "layers.1.attn.compressor.wgate.weight": "model.layers.1.self_attn.compressor.gate_proj.weight",
    "layers.1.attn.compressor.ape": "model.layers.1.self_attn.compressor.position_bias",
    "layers.1.attn.compressor.norm.weight": "model.layers.1.self_attn.compressor.kv_norm.weight",
    "layers.1.attn.indexer.wq_b.weight": "model.layers.1.self_attn.compressor.indexer.q_b_proj.weight",
    "layers.1.attn.indexer.weights_proj.weight": (
        "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight"
    ),
    "layers.1.attn.indexer.compressor.wkv.weight": "model.layers.1.self_attn.compressor.indexer.kv_proj.weight",
    "layers.1.attn.indexer.compressor.wgate.weight": "model.layers.1.self_attn.compressor.indexer.gate_proj.weight",
    "layers.1.attn.indexer.compressor.ape": "model.layers.1.self_attn.compressor.indexer.position_bias",
    "layers.1.attn.indexer.compressor.norm.weight": "model.layers.1.self_attn.compressor.indexer.kv_norm.weight",
    "layers.2.ffn.gate.weight": "model.layers.2.mlp.gate.weight",
    "layers.2.ffn.gate.bias": "model.layers.2.mlp.gate.e_score_correction_bias",
    "layers.1.ffn.gate.tid2eid": "model.layers.1.mlp.gate.tid2eid",
    "layers.2.ffn.shared_experts.w1.weight": "model.layers.2.mlp.shared_experts.gate_proj.weight",
    "layers.2.ffn.shared_experts.w2.weight": "model.layers.2.mlp.shared_experts.down_proj.weight",
    "layers.2.ffn.shared_experts.w3.weight": "model.layers.2.mlp.shared_experts.up_proj.weight",
}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return dict(RandomWeights(FLOAT32, seed=5))


def values(folder: Path) -> dict[str, Tensor]:
    with CheckpointSource(Checkpoint.open(folder)) as source:
        found = {n: dequantize(v) if isinstance(v, Weight) else v for n, v in source.everything()}
        source.finish()
    return found


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def load_theirs(folder: Path) -> Any:
    from transformers import DeepseekV4ForCausalLM

    model, info = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model


def same_as_theirs(model: Any, weights: dict[str, Tensor]) -> None:
    state = model.state_dict()
    for name, theirs in THEIR_NAMES.items():
        assert torch.equal(state[theirs], weights[name]), name
    for layer in range(6):
        for expert in range(8):
            stem = f"layers.{layer}.ffn.experts.{expert}"
            gate_up = torch.cat((weights[f"{stem}.w1.weight"], weights[f"{stem}.w3.weight"]))
            assert torch.equal(state[f"model.layers.{layer}.mlp.experts.gate_up_proj"][expert], gate_up)
            down = weights[f"{stem}.w2.weight"]
            assert torch.equal(state[f"model.layers.{layer}.mlp.experts.down_proj"][expert], down)


@pytest.mark.parametrize("name", THEIR_NAMES)
def test_names_map_both_ways(name: str) -> None:
    assert transformers_name(name) == THEIR_NAMES[name]
    assert [piece.parameter for piece in resolve_name(THEIR_NAMES[name], (1,))] == [name]
    assert [piece.parameter for piece in resolve_name(name, (1,))] == [name]


def test_draft_layers_have_no_transformers_name() -> None:
    assert transformers_name("mtp.0.attn.wkv.weight") is None


@pytest.mark.parametrize("dialect", ["release", "transformers"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_transformers_reads_what_we_write(
    tmp_path: Path, weights: dict[str, Tensor], dialect: Literal["release", "transformers"], num_shards: int
) -> None:
    write_checkpoint(tmp_path / "x", FLOAT32, weights, dialect=dialect, num_shards=num_shards)
    equal(values(tmp_path / "x"), weights)
    same_as_theirs(load_theirs(tmp_path / "x"), weights)


@pytest.mark.parametrize("original_names", [True, False])
def test_we_read_what_transformers_writes(tmp_path: Path, weights: dict[str, Tensor], original_names: bool) -> None:
    write_checkpoint(tmp_path / "x", FLOAT32, weights)
    model = load_theirs(tmp_path / "x")
    model.save_pretrained(tmp_path / "y", save_original_format=original_names, max_shard_size="400KB")
    stacked = {"model.layers.0.mlp.experts.gate_up_proj"} <= names_in(tmp_path / "y")
    assert stacked is not original_names
    equal(values(tmp_path / "y"), weights)


def names_in(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def test_quantised_weights_are_the_same_in_both_dialects(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "release", TINY, seed=5)
    make_checkpoint(tmp_path / "theirs", TINY, seed=5, dialect="transformers")
    ours, theirs = values(tmp_path / "release"), values(tmp_path / "theirs")
    equal(theirs, {name: value for name, value in ours.items() if not name.startswith("mtp.")})
    held = names_in(tmp_path / "theirs")
    assert "model.layers.0.self_attn.q_a_proj.weight_scale_inv" in held
    assert not {name for name in held if name.endswith(".scale") and "_hc." not in name}


def test_stacked_experts_of_bfloat16(tmp_path: Path) -> None:
    plain = TINY.unquantized("bfloat16")
    make_checkpoint(tmp_path / "release", plain, seed=5)
    make_checkpoint(tmp_path / "theirs", plain, seed=5, dialect="transformers", num_shards=2)
    ours, theirs = values(tmp_path / "release"), values(tmp_path / "theirs")
    equal(theirs, {name: value for name, value in ours.items() if not name.startswith("mtp.")})
    assert "model.layers.5.mlp.experts.down_proj" in names_in(tmp_path / "theirs")


def test_experts_one_by_one_under_their_module_names() -> None:
    for theirs, ours in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        name = f"model.layers.4.mlp.experts.7.{theirs}.weight"
        assert [piece.parameter for piece in resolve_name(name, (1, 1))] == [f"layers.4.ffn.experts.7.{ours}.weight"]
