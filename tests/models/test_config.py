"""What a DeepSeek-V4 configuration accepts, refuses and derives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halocline.hal.errors import ConfigError
from halocline.models.deepseek_v4.config import DeepseekV4Config, DsparkConfig
from halocline.models.deepseek_v4.presets import FLASH, FLASH_0731, PRESETS, PRO, TINY, VENDOR_TINY, preset


def test_released_layers_have_the_published_kinds() -> None:
    for config, counts in ((FLASH, (2, 21, 20)), (FLASH_0731, (2, 21, 20)), (PRO, (0, 30, 31))):
        assert tuple(config.main_ratios.count(ratio) for ratio in (0, 4, 128)) == counts
    assert len(FLASH.compress_ratios) == 44
    assert len(FLASH_0731.compress_ratios) == 46
    assert len(PRO.compress_ratios) == 62
    assert (FLASH.num_mtp_layers, FLASH.num_dspark_stages) == (1, 0)
    assert (FLASH_0731.num_mtp_layers, FLASH_0731.num_dspark_stages) == (0, 3)
    assert FLASH_0731.num_nextn_predict_layers == 1  # as its file says, although there are three stages


def test_layers_know_their_kind_routing_and_rotary_table() -> None:
    assert [TINY.layer_kind(layer) for layer in (0, 1, 2, 6)] == [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "sliding_attention",
    ]
    assert [layer for layer in range(7) if TINY.is_hash_routed(layer)] == [0, 1]
    assert [layer for layer in range(7) if TINY.has_indexer(layer)] == [1, 3]
    assert (TINY.compressor_series(4), TINY.compressor_series(128)) == (2, 1)
    plain, compressed = TINY.rope_for(0), TINY.rope_for(128)
    assert (plain.theta, plain.yarn) == (10000, None)
    assert compressed.theta == 160000
    assert compressed == TINY.rope_for(4)
    assert compressed.yarn is not None
    assert (compressed.yarn.factor, compressed.yarn.original_max_position_embeddings) == (16, 128)
    assert TINY.nope_head_dim == 64
    assert TINY.heads_per_group == 4


def test_vendor_tiny_keeps_what_vendor_kernels_fix() -> None:
    c = VENDOR_TINY
    assert (c.hidden_size, c.num_attention_heads, c.head_dim, c.sliding_window) == (256, 4, 512, 128)
    assert (c.index_n_heads, c.index_head_dim, c.index_topk) == (32, 128, 64)
    assert (c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (8, 2, 128)
    assert c.compress_ratios == (0, 4, 128, 4, 128, 0)
    assert (c.num_hash_layers, c.vocab_size) == (1, 1024)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 32}, "head_dim=32 is smaller than qk_rope_head_dim=64"),
    ({"index_head_dim": 32}, "index_head_dim=32 is smaller than qk_rope_head_dim=64"),
    ({"index_head_dim": 96}, "index_head_dim must be a power of two"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
    ({"compress_ratios": (0, 4, 128, 4, 64, 0, 0)}, r"compress_ratios may hold 0, 4 and 128, found \[64\]"),
    ({"compress_ratios": (0, 4, 128)}, "compress_ratios has 3 entries, expected 7: 6 layers and 1 MTP layers"),
    ({"compress_ratios": (0, 4, 128, 4, 128, 0, 4)}, "draft layers have no compressor"),
    ({"o_groups": 3}, "num_attention_heads=8 is not divisible by o_groups=3"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds n_routed_experts=8"),
    ({"num_hash_layers": 7}, "num_hash_layers=7 exceeds num_hidden_layers=6"),
    ({"hidden_size": -64}, "hidden_size must be above 0, found -64"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be above 0"),
    ({"swiglu_limit": -1.0}, "swiglu_limit must not be negative"),
    ({"hidden_size": 64.0}, "hidden_size must be an integer, found 64.0"),
    ({"hidden_size": True}, "hidden_size must be an integer, found True"),
    ({"rope_theta": "10000"}, "rope_theta must be a finite number, found '10000'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
    ({"rope_theta": 0.5}, "rope_theta must be above 1"),
    ({"hidden_size": 80}, "hidden_size=80 is not a multiple of 32, the scale group of fp4 experts"),
    ({"expert_dtype": "int4"}, "expert_dtype must be one of fp4, fp8, nvfp4, bfloat16, float32, found 'int4'"),
    ({"quantization": None}, "expert_dtype='fp4' needs a quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu' as in every release, found 'gelu'"),
    ({"scoring_func": "sigmoid"}, "scoring_func must be 'sqrtsoftplus'"),
    ({"num_key_value_heads": 8}, "num_key_value_heads must be 1"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
    ({"norm_topk_prob": False}, "norm_topk_prob must be True"),
    ({"bos_token_id": 512}, "bos_token_id=512 is outside the vocabulary of 512"),
    ({"eos_token_ids": ()}, "eos_token_id is empty"),
    ({"dtype": "float16"}, "torch_dtype must be bfloat16 or float32, found 'float16'"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TINY.replace(**changes)
    assert caught.value.exit_code == 2


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TINY.replace(o_groups=3, num_experts_per_tok=9, bos_token_id=-1)
    assert "3 problem(s)" in str(caught.value)
    for part in ("o_groups=3", "num_experts_per_tok=9", "bos_token_id=-1"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (3, 4, 6)}, "increasing numbers of layers below 6"),
        ({"target_layer_ids": (4, 3, 5)}, "increasing numbers of layers"),
        ({"target_layer_ids": (4, 5)}, "expected 8: 6 layers and 2 DSpark stages"),
        ({"noise_token_id": 512}, "dspark_noise_token_id=512 is outside the vocabulary"),
        ({"block_size": 0}, "dspark_block_size and dspark_markov_rank must be above 0"),
        ({"markov_rank": "8"}, "dspark.markov_rank must be an integer"),
    ],
)
def test_impossible_dspark_is_refused(changes: dict[str, Any], message: str) -> None:
    stated: dict[str, Any] = {"block_size": 5, "noise_token_id": 3, "target_layer_ids": (3, 4, 5), "markov_rank": 8}
    ratios = (*TINY.main_ratios, 0, 0, 0)
    assert TINY.replace(compress_ratios=ratios, dspark=DsparkConfig(**stated)).num_dspark_stages == 3
    with pytest.raises(ConfigError, match=message):
        TINY.replace(compress_ratios=ratios, dspark=DsparkConfig(**stated | changes))


def test_derived_configurations() -> None:
    assert TINY.without_draft().compress_ratios == TINY.main_ratios
    assert TINY.without_draft().num_mtp_layers == 0
    assert FLASH_0731.without_draft().dspark is None
    plain = TINY.unquantized("float32")
    assert (plain.quantization, plain.expert_dtype, plain.dtype) == (None, "float32", "float32")


def test_presets_are_found_by_name() -> None:
    assert {name: preset(name) for name in PRESETS} == PRESETS
    with pytest.raises(ConfigError, match="unknown preset 'small'; known: tiny, vendor-tiny, flash"):
        preset("small")


class TestFiles:
    def test_a_folder_or_its_config_json(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(TINY.to_dict()))
        assert DeepseekV4Config.from_file(tmp_path) == DeepseekV4Config.from_file(file) == TINY

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no such model: .*/nowhere\n  asked .*\n  found .*\n  try "):
            DeepseekV4Config.from_file(tmp_path / "nowhere")

    def test_a_folder_without_config(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ConfigError, match=r"no config.json in .*\n  found +model.safetensors"):
            DeepseekV4Config.from_file(tmp_path)

    def test_broken_json(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4",\n "dim" 3}')
        with pytest.raises(ConfigError, match=r"config.json is not valid JSON\n  found  line 2, column 8"):
            DeepseekV4Config.from_file(tmp_path)

    def test_json_that_is_no_object(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("[1, 2]")
        with pytest.raises(ConfigError, match="holds a JSON list, expected an object"):
            DeepseekV4Config.from_file(tmp_path)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
            DeepseekV4Config.from_file(tmp_path)


def test_configuration_and_plan_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from halocline.models.deepseek_v4.presets import TINY\n"
        "from halocline.models.registry import FAMILIES\n"
        "import halocline.models.checkpoint\n"
        "FAMILIES['deepseek_v4'].plan_weights(TINY).nbytes\n"
        "FAMILIES['deepseek_v4'].name_resolver()\n"
        "print([m for m in ('torch', 'numpy', 'triton', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
