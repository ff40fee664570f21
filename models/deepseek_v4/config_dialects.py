"""Reading config.json of DeepSeek-V4 in its three dialects; `config_writer` writes two of them.

The release's own file, the vendor's short-named `inference/config.json`, and the file that Transformers saves
(`layer_types`, `mlp_layer_types`, `compress_rates`, `rope_parameters`). Short names are renamed first; then each
group of facts is read from whichever dialect states it. Two statements of one fact must agree.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from halocline.hal.errors import ConfigError, lines
from halocline.models.deepseek_v4 import config_numerics
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.config_reading import Reading

__all__ = ["MODEL_TYPE", "PLAIN_FIELDS", "parse"]

logger = logging.getLogger(__name__)

MODEL_TYPE = "deepseek_v4"

# The vendor's short names, and the names that other engines use for the same facts.
_ALIASES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "n_mtp_layers": "num_nextn_predict_layers",
}
# Stated by some files, without effect on the network.
_IGNORED = {
    *("model_type", "architectures", "auto_map", "_name_or_path", "transformers_version", "pretraining_tp"),
    *("torch_dtype", "dtype", "initializer_range", "attention_dropout", "use_cache", "mlp_bias", "pad_token_id"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "return_dict", "output_hidden_states"),
    *("output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type"),
    *("max_batch_size", "max_seq_len", "v_head_dim", "qk_nope_head_dim", "ep_size", "rope_type", "scale_dtype"),
}
# Read by one of the methods below, not copied into a field of the same name.
_COMPOSED_KEYS = {
    *("compress_ratios", "layer_types", "compress_rates", "compress_rate_csa", "compress_rate_hca"),
    *("mlp_layer_types", "num_hash_layers", "num_nextn_predict_layers", "n_group", "topk_group"),
    *("rope_scaling", "rope_parameters", "rope_theta", "compress_rope_theta", "rope_factor", "beta_fast", "beta_slow"),
    *("original_seq_len", "partial_rotary_factor", "qk_rope_head_dim", "quantization_config", "scale_fmt"),
    *("expert_dtype", "bos_token_id", "eos_token_id"),
    *("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank"),
}
_COMPOSED_FIELDS = {"rope_scaling", "quantization", "dspark", "eos_token_ids", "dtype", "expert_dtype"}
PLAIN_FIELDS = {field.name for field in dataclasses.fields(DeepseekV4Config)} - _COMPOSED_FIELDS
_CONTAINERS = {
    "rope_scaling": dict,
    "rope_parameters": dict,
    "compress_rates": dict,
    "quantization_config": dict,
    "compress_ratios": list,
    "layer_types": list,
    "mlp_layer_types": list,
    "dspark_target_layer_ids": list,
}


def parse(raw: dict[str, Any], *, source: str) -> DeepseekV4Config:
    """Reads a parsed config.json; see `DeepseekV4Config.from_dict`."""
    _check_model_type(raw, source)
    reading = Reading(raw=_rename(raw, source), source=source)
    _check_containers(reading)
    for name in ("n_group", "topk_group"):
        if reading.get(name) not in (None, 0, 1):
            reading.refuse(
                f"{name}={reading.get(name)}: DeepSeek-V4 routes without expert groups",
                hint=f"remove {name} from config.json, or use a DeepSeek-V4 checkpoint",
            )
    values = _read_fields(reading)
    _refuse_missing(reading, values)
    unread = sorted(set(reading.raw) - PLAIN_FIELDS - _COMPOSED_KEYS - _IGNORED)
    if unread:
        logger.info("%s: keys that nothing reads: %s", source, ", ".join(unread))
    try:
        return DeepseekV4Config(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _check_model_type(raw: dict[str, Any], source: str) -> None:
    short = "model_type" not in raw and "dim" in raw and "n_layers" in raw
    found = MODEL_TYPE if short else raw.get("model_type")
    if found == MODEL_TYPE:
        return
    if found == "deepseek_v41" or (found is None and "text_config" in raw):
        summary = f"{source}: deepseek_v41 (DeepSeek-V4.1) is not supported"
        hint = "use a DeepSeek-V4 checkpoint: V4.1 shares caches between layers and has other tensors"
    else:
        summary = f"{source}: unsupported model_type {found!r}"
        hint = "use a DeepSeek-V4 checkpoint, or correct model_type in config.json"
    raise ConfigError(lines(summary, asked=f"model_type {MODEL_TYPE!r}", found=f"model_type {found!r}", try_=hint))


def _rename(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """Gives every fact its release name."""
    reading = Reading(raw={key: value for key, value in raw.items() if key not in _ALIASES}, source=source)
    for short, name in _ALIASES.items():
        if short in raw:
            reading.agree(name, short, raw[short], name, reading.raw.get(name, raw[short]))
            reading.raw[name] = raw[short]
    return reading.raw


def _check_containers(reading: Reading) -> None:
    for name, kind in _CONTAINERS.items():
        value = reading.get(name)
        if value is not None and not isinstance(value, kind):
            wanted = "an object" if kind is dict else "a list"
            reading.refuse(f"{name} must be {wanted}, found {value!r}", hint=f"correct {name} in config.json")


def _read_fields(reading: Reading) -> dict[str, Any]:
    plain = PLAIN_FIELDS - _COMPOSED_KEYS
    values = {name: reading.raw[name] for name in sorted(plain) if reading.get(name) is not None}
    values["qk_rope_head_dim"] = config_numerics.read_rope_width(reading)
    values.update(config_numerics.read_ropes(reading))
    values["num_hash_layers"] = config_numerics.read_hash_layers(reading)
    values["dspark"] = config_numerics.read_dspark(reading)
    values.update(config_numerics.read_ratios(reading, values["dspark"]))
    values["quantization"] = config_numerics.read_quantization(reading)
    values["expert_dtype"] = config_numerics.read_expert_dtype(reading, values["quantization"])
    values["dtype"] = config_numerics.read_dtype(reading)
    bos, eos = reading.get("bos_token_id"), reading.get("eos_token_id")
    if bos is not None:
        values["bos_token_id"] = bos
    if eos is not None:
        values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
    return values


def _refuse_missing(reading: Reading, values: dict[str, Any]) -> None:
    missing = list(reading.missing)
    reported = {name.split(".")[0] for name in missing} | {"quantization"}
    for field in dataclasses.fields(DeepseekV4Config):
        if field.default is dataclasses.MISSING and values.get(field.name) is None and field.name not in reported:
            missing.append(field.name)
    if missing:
        reading.refuse(
            f"{len(missing)} required field(s) missing",
            asked=", ".join(missing),
            found=f"{len(reading.raw)} other fields",
            hint="copy config.json again from the release; what is missing is never taken for 'off'",
        )
