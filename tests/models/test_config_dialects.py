"""config.json in the release's, the vendor's short and Transformers' dialect gives one and the same configuration."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from halocline.hal.errors import ConfigError
from halocline.models.deepseek_v4.config import DeepseekV4Config, Quantization
from halocline.models.deepseek_v4.presets import FLASH, FLASH_0731, PRESETS, PRO, TINY

# The public files, typed in from the specification, not made by the code under test.
RELEASE: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
}
SHORT: dict[str, Any] = {
    "vocab_size": 129280,
    "dim": 4096,
    "moe_inter_dim": 2048,
    "n_layers": 43,
    "n_hash_layers": 3,
    "n_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "dtype": "fp8",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
}
DSPARK = {
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
PRO_CHANGES = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}


def read(raw: dict[str, Any]) -> DeepseekV4Config:
    return DeepseekV4Config.from_dict(raw, source="config.json")


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def test_the_release_files_give_the_presets() -> None:
    assert read(RELEASE) == FLASH
    assert read(RELEASE | DSPARK) == FLASH_0731
    assert read(RELEASE | PRO_CHANGES) == PRO


def test_the_short_dialect_gives_the_same() -> None:
    assert read(SHORT) == FLASH
    assert read(SHORT | {"n_mtp_layers": 1, "norm_eps": 1e-6, "hc_eps": 1e-6, "max_seq_len": 4096}) == FLASH
    assert read(SHORT | DSPARK | {"n_mtp_layers": 3}) == FLASH_0731


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dialect", ["release", "transformers"])
def test_writing_and_reading_gives_an_equal_object(name: str, dialect: Any) -> None:
    config = PRESETS[name]
    expected = config if dialect == "release" else config.without_draft()
    assert read(config.to_dict(dialect=dialect)) == expected
    plain = expected.unquantized("float32")
    assert read(plain.to_dict(dialect=dialect)) == plain
    nvfp4 = expected.replace(expert_dtype="nvfp4")
    assert read(nvfp4.to_dict(dialect=dialect)) == nvfp4


def test_transformers_own_configuration_gives_the_same() -> None:
    from transformers import DeepseekV4Config as Theirs

    release = TINY.to_dict()
    theirs = Theirs(
        **without(release, "architectures", "model_type", "rope_scaling"),
        rope_parameters={"rope_type": "yarn", **without(release["rope_scaling"], "type")},
    ).to_dict()
    assert "layer_types" in theirs
    assert "compress_ratios" not in theirs
    assert read(theirs) == TINY.without_draft()


@pytest.mark.parametrize("form", ["nested", "flat", "flat_with_theta"])
def test_rope_parameters_nested_or_flat(form: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"original_max_position_embeddings": 65536, "attention_factor": 1.0}
    raw = without(RELEASE, "rope_scaling", "rope_theta", "compress_rope_theta", "qk_rope_head_dim")
    thetas = {"rope_theta": 10000, "compress_rope_theta": 160000}
    if form == "nested":
        share = {"partial_rotary_factor": 0.125}
        raw["rope_parameters"] = {
            "main": {"rope_type": "default", "rope_theta": 10000, **share},
            "compress": {**yarn, "rope_theta": 160000, **share},
        }
    else:
        raw |= {"rope_parameters": yarn, "partial_rotary_factor": 0.125, **thetas}
    if form == "flat_with_theta":
        raw["rope_parameters"] = yarn | {"rope_theta": 10000}
    assert read(raw) == FLASH


def test_an_explicit_default_table_means_no_yarn_and_silence_does_not() -> None:
    config = read(RELEASE | {"rope_scaling": {"type": "default"}})
    assert config.rope_scaling.factor == 1
    with pytest.raises(ConfigError, match=r"rope_scaling.factor, .*rope_scaling.original_max_position_embeddings"):
        read(without(RELEASE, "rope_scaling"))


def test_base_files_have_fp8_experts_and_float32_scales() -> None:
    raw = without(RELEASE, "expert_dtype")
    raw["quantization_config"] = without(RELEASE["quantization_config"], "scale_fmt")
    config = read(raw)
    assert (config.expert_dtype, config.quantization) == ("fp8", Quantization(scale_fmt="float32"))


def test_plain_and_nvfp4_files() -> None:
    assert read(without(RELEASE, "expert_dtype", "quantization_config")).expert_dtype == "bfloat16"
    nested = {**RELEASE["quantization_config"], "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
    assert read(RELEASE | {"quantization_config": nested}).expert_dtype == "nvfp4"
    moved = {**RELEASE["quantization_config"], "expert_dtype": "fp4"}
    assert read(without(RELEASE, "expert_dtype") | {"quantization_config": moved}) == FLASH


def test_ratios_left_behind_by_removed_draft_layers() -> None:
    assert read(RELEASE | {"num_nextn_predict_layers": 0}) == FLASH.without_draft()
    assert read(SHORT | {"n_mtp_layers": 0}) == FLASH.without_draft()


REQUIRED = sorted(
    {*RELEASE}
    - {"architectures", "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "expert_dtype", "hc_eps"}
    - {"hc_sinkhorn_iters", "hidden_act", "initializer_range", "max_position_embeddings", "model_type"}
    - {"n_shared_experts", "norm_topk_prob", "num_key_value_heads", "num_nextn_predict_layers", "quantization_config"}
    - {"rms_norm_eps", "rope_scaling", "scoring_func", "tie_word_embeddings", "topk_method", "torch_dtype"}
    - {"transformers_version", "use_cache"}
)


@pytest.mark.parametrize("name", REQUIRED)
def test_what_the_family_does_not_share_must_be_stated(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"1 required field\(s\) missing\n  asked +{name}\n"):
        read(without(RELEASE, name))
    with pytest.raises(ConfigError, match=rf"asked +{name}\n"):
        read(RELEASE | {name: None})


def test_swiglu_limit_is_among_them() -> None:
    assert "swiglu_limit" in REQUIRED


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"3 required field\(s\) missing\n  asked +vocab_size, hidden_size, head_dim\n"
    ):
        read(without(RELEASE, "vocab_size", "hidden_size", "head_dim", "qk_rope_head_dim") | {"rope_head_dim": 64})


def test_half_a_drafter_is_no_drafter() -> None:
    with pytest.raises(ConfigError, match=r"asked +dspark_markov_rank"):
        read(without(RELEASE | DSPARK, "dspark_markov_rank"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v41"}, r"deepseek_v41 \(DeepSeek-V4.1\) is not supported"),
        ({"model_type": "llama"}, "unsupported model_type 'llama'"),
        ({"model_type": None}, "unsupported model_type None"),
        ({"n_group": 8}, "n_group=8: DeepSeek-V4 routes without expert groups"),
        ({"sliding_window": 128, "window_size": 64}, "two statements of sliding_window differ"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor must be a share of the head, found 2"),
        ({"partial_rotary_factor": 0.5}, "two statements of qk_rope_head_dim differ"),
        ({"layer_types": ["sliding_attention"] * 43}, "two statements of the kinds of layers differ"),
        ({"layer_types": ["full_attention"] * 43}, "unknown layer_types: full_attention"),
        ({"mlp_layer_types": ["moe"] * 43}, "two statements of num_hash_layers differ"),
        ({"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41}, "must be hash_moe layers followed by moe layers"),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, "the compress ratio of compressed_sparse_attention"),
        ({"rope_scaling": {**RELEASE["rope_scaling"], "mscale": 1.3}}, "has no magnitude factor"),
        ({"rope_scaling": {**RELEASE["rope_scaling"], "type": "linear"}}, "rope scaling of type 'linear'"),
        ({"rope_scaling": 16}, "rope_scaling must be an object, found 16"),
        ({"compress_ratios": 4}, "compress_ratios must be a list, found 4"),
        ({"compress_ratios": [0, "4"]}, r"compress_ratios must be a list of integers, found \[0, '4'\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method='awq' is not supported"),
        ({"quantization_config": {"scale_fmt": "e5m2"}}, "quantization_config.scale_fmt='e5m2' is not supported"),
        ({"quantization_config": {"weight_block_size": [32, 32]}}, r"weight_block_size must be \[128, 128\]"),
        ({"quantization_config": {"activation_scheme": "static"}}, "activation_scheme='static' is not supported"),
        ({"num_nextn_predict_layers": 2}, "compress_ratios has 44 entries, expected 45"),
    ],
)
def test_what_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(RELEASE | changes)
    assert "config.json" in str(caught.value)
    assert "\n  try" in str(caught.value)


def test_v41_is_known_by_its_nested_form() -> None:
    with pytest.raises(ConfigError, match="deepseek_v41"):
        read({"text_config": {}, "vision_config": {}})


def test_keys_that_nothing_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="halocline"):
        read(RELEASE | {"swiglu_limt": 7.0})
    assert caplog.messages == ["config.json: keys that nothing reads: swiglu_limt"]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="halocline"):
        read(RELEASE)
        read(SHORT)
    assert caplog.messages == []


WEIRD: list[Any] = [None, -1, 0, 3.5, 1e999, "x", "", True, [], [None], [1, "2"], {}, {"a": 1}, {"main": 3}]


OTHERS = ("layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor", "compress_rates", "n_group")


@pytest.mark.parametrize("name", [*RELEASE, *SHORT, *DSPARK, *OTHERS, "compress_rate_csa", "clamp_shared_expert"])
def test_no_value_of_any_field_escapes_as_another_error(name: str) -> None:
    base = SHORT if name in SHORT and name not in RELEASE else RELEASE | DSPARK
    for value in WEIRD:
        nested = [{**base[name], key: value} for key in base[name]] if isinstance(base.get(name), dict) else []
        for raw in [base | {name: value}, *(base | {name: inner} for inner in nested)]:
            try:
                config = read(raw)
            except ConfigError:
                continue
            assert read(config.to_dict()) == config
