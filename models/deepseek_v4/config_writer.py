"""Writing config.json of DeepSeek-V4 in the release's and in Transformers' dialect."""

from __future__ import annotations

import dataclasses
from typing import Any

from halocline.models.deepseek_v4.config import LAYER_KINDS, DeepseekV4Config
from halocline.models.deepseek_v4.config_dialects import MODEL_TYPE, PLAIN_FIELDS

__all__ = ["to_release", "to_transformers"]


def to_release(config: DeepseekV4Config) -> dict[str, Any]:
    """Writes the release's own dialect."""
    out: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": MODEL_TYPE}
    for name in sorted(PLAIN_FIELDS):
        value = getattr(config, name)
        out[name] = list(value) if isinstance(value, tuple) else value
    out["rope_scaling"] = {"type": "yarn", **dataclasses.asdict(config.rope_scaling)}
    out.update(_token_ids(config))
    out["torch_dtype"] = config.dtype
    out["expert_dtype"] = config.expert_dtype
    if config.quantization:
        out["quantization_config"] = _quantization_config(config)
    if config.dspark:
        for name, value in dataclasses.asdict(config.dspark).items():
            out[f"dspark_{name}"] = list(value) if isinstance(value, tuple) else value
    return out


def to_transformers(config: DeepseekV4Config) -> dict[str, Any]:
    """Writes what Transformers saves. Draft layers are unknown to it and are dropped."""
    out = to_release(config)
    for name in (
        "compress_ratios",
        "num_hash_layers",
        "rope_scaling",
        "topk_method",
        "torch_dtype",
        "clamp_shared_expert",
    ):
        del out[name]
    for name in [name for name in out if name.startswith("dspark_")]:
        del out[name]
    layers = config.num_hidden_layers
    partial = {"partial_rotary_factor": config.qk_rope_head_dim / config.head_dim}
    hashed = config.num_hash_layers
    yarn = {"rope_type": "yarn", "attention_factor": 1.0, **dataclasses.asdict(config.rope_scaling)}
    return (
        out
        | partial
        | {
            "dtype": config.dtype,
            "num_nextn_predict_layers": 0,
            "layer_types": [config.layer_kind(layer) for layer in range(layers)],
            "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
            "compress_rates": {LAYER_KINDS[4]: 4, LAYER_KINDS[128]: 128},
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": config.rope_theta, **partial},
                "compress": {**yarn, "rope_theta": config.compress_rope_theta, **partial},
            },
        }
    )


def _token_ids(config: DeepseekV4Config) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {"bos_token_id": config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else list(eos)}


def _quantization_config(config: DeepseekV4Config) -> dict[str, Any]:
    assert config.quantization is not None
    out: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": config.quantization.scale_fmt,
        "weight_block_size": list(config.quantization.weight_block_size),
    }
    if config.expert_dtype == "nvfp4":
        out |= {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
    return out
