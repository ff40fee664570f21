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
from halocline.models.deepseek_v4.config import (
    LAYER_KINDS,
    DeepseekV4Config,
    DsparkConfig,
    Quantization,
    YarnScaling,
)

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
_EXPERT_DTYPES = {
    "fp4": "fp4",
    "mxfp4": "fp4",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "nvfp4",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "float32": "float32",
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
    return _Reader(raw, source).read()


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


class _Reader:
    """One pass over a raw config; collects what is missing so that one message names all of it."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.source = source
        self.missing: list[str] = []
        self.raw = self._rename(raw)
        for name, kind in _CONTAINERS.items():
            value = self.raw.get(name)
            if value is not None and not isinstance(value, kind):
                wanted = "an object" if kind is dict else "a list"
                raise ConfigError(
                    lines(f"{source}: {name} must be {wanted}, found {value!r}", try_="correct it in config.json")
                )

    def read(self) -> DeepseekV4Config:
        raw = self.raw
        self._refuse_unused_routing()
        values: dict[str, Any] = {
            name: raw[name] for name in PLAIN_FIELDS if raw.get(name) is not None and name not in _COMPOSED_KEYS
        }
        values["qk_rope_head_dim"] = self._rope_width()
        values.update(self._ropes())
        values["num_hash_layers"] = self._hash_layers()
        values["dspark"] = self._dspark()
        values.update(self._ratios(values["dspark"]))
        values["quantization"] = self._quantization()
        values["expert_dtype"] = self._expert_dtype(values["quantization"])
        values["dtype"] = self._dtype()
        if raw.get("bos_token_id") is not None:
            values["bos_token_id"] = raw["bos_token_id"]
        if raw.get("eos_token_id") is not None:
            eos = raw["eos_token_id"]
            values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
        self._refuse_missing(values)
        unread = sorted(set(raw) - PLAIN_FIELDS - _COMPOSED_KEYS - _IGNORED)
        if unread:
            logger.info("%s: keys that nothing reads: %s", self.source, ", ".join(unread))
        try:
            return DeepseekV4Config(**values)
        except ConfigError as error:
            raise ConfigError(f"{self.source}: {error}") from error

    def _rename(self, raw: dict[str, Any]) -> dict[str, Any]:
        renamed = {key: value for key, value in raw.items() if key not in _ALIASES}
        for short, name in _ALIASES.items():
            if short in raw:
                self._agree(name, short, raw[short], name, renamed.get(name, raw[short]))
                renamed[name] = raw[short]
        return renamed

    def _agree(self, fact: str, label_a: str, a: object, label_b: str, b: object) -> None:
        if a != b:
            raise ConfigError(
                lines(
                    f"{self.source}: two statements of {fact} differ",
                    found=f"{label_a} says {a}, {label_b} says {b}",
                    try_="keep one of them in config.json",
                )
            )

    def _refuse_missing(self, values: dict[str, Any]) -> None:
        reported = {name.split(".")[0] for name in self.missing} | {"quantization"}
        for field in dataclasses.fields(DeepseekV4Config):
            if field.default is dataclasses.MISSING and values.get(field.name) is None and field.name not in reported:
                self.missing.append(field.name)
        if self.missing:
            raise ConfigError(
                lines(
                    f"{self.source}: {len(self.missing)} required field(s) missing",
                    asked=", ".join(self.missing),
                    found=f"{len(self.raw)} other fields",
                    try_="copy config.json again from the release; what is missing is never taken for 'off'",
                )
            )

    def _need(self, name: str, label: str | None = None) -> Any:
        value = self.raw.get(name)
        if value is None:
            self.missing.append(label or name)
        return value

    def _refuse_unused_routing(self) -> None:
        for name in ("n_group", "topk_group"):
            if self.raw.get(name) not in (None, 0, 1):
                raise ConfigError(
                    lines(
                        f"{self.source}: {name}={self.raw[name]}: DeepSeek-V4 routes without expert groups",
                        try_=f"remove {name} from config.json, or use a DeepSeek-V4 checkpoint",
                    )
                )

    def _rope_width(self) -> Any:
        width, factor = self.raw.get("qk_rope_head_dim"), self.raw.get("partial_rotary_factor")
        nested = (self.raw.get("rope_parameters") or {}).get("main")
        if factor is None and isinstance(nested, dict):
            factor = nested.get("partial_rotary_factor")
        head_dim = self.raw.get("head_dim")
        derived = round(factor * head_dim) if isinstance(factor, (int, float)) and isinstance(head_dim, int) else None
        if width is not None and derived is not None:
            self._agree("the rotary width", "qk_rope_head_dim", width, "partial_rotary_factor * head_dim", derived)
        if width is None and derived is None:
            self.missing.append("qk_rope_head_dim")
        return derived if width is None else width

    def _ropes(self) -> dict[str, Any]:
        """Reads both rotary tables from flat fields, `rope_scaling`, or flat or nested `rope_parameters`."""
        raw = self.raw
        parameters = raw.get("rope_parameters") or {}
        main = parameters.get("main") if isinstance(parameters.get("main"), dict) else {}
        compress = parameters["compress"] if isinstance(parameters.get("compress"), dict) else parameters
        main_type = main.get("rope_type", main.get("type", "default"))
        self._agree(
            "the rotary table of sliding layers",
            "rope_parameters.main.rope_type",
            main_type,
            "every release",
            "default",
        )
        theta = self._one("rope_theta", raw.get("rope_theta"), main.get("rope_theta"))
        nested_theta = compress.get("rope_theta") if compress is not parameters else None
        compress_theta = self._one("compress_rope_theta", raw.get("compress_rope_theta"), nested_theta)
        return {
            "rope_theta": theta,
            "compress_rope_theta": compress_theta,
            "rope_scaling": self._yarn(raw.get("rope_scaling"), compress),
        }

    def _one(self, fact: str, *statements: Any) -> Any:
        stated = [value for value in statements if value is not None]
        if not stated:
            self.missing.append(fact)
            return None
        for other in stated[1:]:
            self._agree(fact, "one place", stated[0], "another", other)
        return stated[0]

    def _yarn(self, scaling: dict[str, Any] | None, compress: dict[str, Any]) -> YarnScaling | None:
        raw = self.raw
        merged = {**compress, **(scaling or {})}
        short = {
            "factor": "rope_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "original_max_position_embeddings": "original_seq_len",
        }
        for name, short_name in short.items():
            if name not in merged and raw.get(short_name) is not None:
                merged[name] = raw[short_name]
        kind = merged.get("rope_type", merged.get("type"))
        if kind == "default":
            length = raw.get("max_position_embeddings", DeepseekV4Config.max_position_embeddings)
            return YarnScaling(factor=1.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=length)
        if kind not in (None, "yarn"):
            raise ConfigError(
                lines(
                    f"{self.source}: rope scaling of type {kind!r} is not DeepSeek-V4's",
                    asked="type yarn, or an explicit default",
                    try_="correct rope_scaling in config.json",
                )
            )
        absent = [f"rope_scaling.{name}" for name in short if merged.get(name) is None]
        if absent:
            self.missing.extend(absent)
            return None
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if merged.get(name) not in (None, 0, 0.0, 1, 1.0):
                raise ConfigError(
                    lines(
                        f"{self.source}: rope_scaling.{name}={merged[name]}: DeepSeek-V4 has no magnitude factor",
                        try_=f"remove {name} from config.json",
                    )
                )
        return YarnScaling(**{name: merged[name] for name in short})

    def _hash_layers(self) -> Any:
        count, types = self.raw.get("num_hash_layers"), self.raw.get("mlp_layer_types")
        if types is None:
            return self._need("num_hash_layers")
        hashed = sum(kind == "hash_moe" for kind in types)
        if list(types) != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed):
            raise ConfigError(
                lines(
                    f"{self.source}: mlp_layer_types must be hash_moe layers followed by moe layers",
                    found=", ".join(map(str, types)),
                    try_="correct mlp_layer_types in config.json",
                )
            )
        self._agree(
            "the number of layers",
            "mlp_layer_types",
            len(types),
            "num_hidden_layers",
            self.raw.get("num_hidden_layers"),
        )
        if count is not None:
            self._agree("the hash layers", "num_hash_layers", count, "mlp_layer_types", hashed)
        return hashed

    def _ratios(self, dspark: DsparkConfig | None) -> dict[str, Any]:
        """Reads the ratio of each layer and how many draft layers follow the main ones."""
        raw = self.raw
        layers, ratios, types = raw.get("num_hidden_layers"), raw.get("compress_ratios"), raw.get("layer_types")
        rates = {kind: ratio for ratio, kind in LAYER_KINDS.items()}
        stated = dict(raw.get("compress_rates") or {})
        for key, kind in (("compress_rate_csa", LAYER_KINDS[4]), ("compress_rate_hca", LAYER_KINDS[128])):
            if raw.get(key) is not None:
                stated[kind] = raw[key]
        for kind, ratio in stated.items():
            self._agree(f"the compress ratio of {kind}", "compress_rates", ratio, "DeepSeek-V4", rates.get(kind))
        from_types: tuple[int, ...] | None = None
        if types is not None:
            unknown = sorted({str(kind) for kind in types if kind not in rates})
            if unknown:
                raise ConfigError(
                    lines(
                        f"{self.source}: unknown layer_types: {', '.join(unknown)}",
                        asked=", ".join(rates),
                        try_="correct layer_types in config.json",
                    )
                )
            from_types = tuple(rates[kind] for kind in types)
        if ratios is None and from_types is None:
            self.missing.append("compress_ratios")
            return {"num_nextn_predict_layers": 0}
        if ratios is None:
            return {"compress_ratios": from_types, "num_nextn_predict_layers": 0, "dspark": None}
        ratios = tuple(ratios)
        if from_types is not None and isinstance(layers, int):
            self._agree("the kinds of layers", "compress_ratios", ratios[:layers], "layer_types", from_types[:layers])
        return self._draft_layers(ratios, layers, dspark)

    def _draft_layers(self, ratios: tuple[Any, ...], layers: Any, dspark: DsparkConfig | None) -> dict[str, Any]:
        tail = len(ratios) - layers if isinstance(layers, int) else 0
        declared = self.raw.get("num_nextn_predict_layers")
        if declared is None:
            declared = 1 if dspark else max(tail, 0)
        elif declared == 0 and dspark is None and tail > 0:
            ratios = ratios[:layers]  # draft layers were removed from the checkpoint, their ratios left behind
        elif dspark is not None:
            declared = 1
        return {"compress_ratios": ratios, "num_nextn_predict_layers": declared}

    def _dspark(self) -> DsparkConfig | None:
        names = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
        if all(self.raw.get(name) is None for name in names):
            return None
        block, noise, targets, rank = (self._need(name) for name in names)
        if None in (block, noise, targets, rank):
            return None
        return DsparkConfig(block_size=block, noise_token_id=noise, target_layer_ids=tuple(targets), markov_rank=rank)

    def _quantization(self) -> Quantization | None:
        raw = self.raw.get("quantization_config")
        if raw is None and self.raw.get("dtype") == "fp8":
            raw = {"quant_method": "fp8", "scale_fmt": self.raw.get("scale_fmt"), "weight_block_size": [128, 128]}
        if raw is None:
            return None
        method = str(raw.get("quant_method", "fp8")).lower()
        for name, value, known in (
            ("quant_method", method, ("fp8", "modelopt", "modelopt_mixed", "modelopt_fp4")),
            ("fmt", raw.get("fmt", "e4m3"), ("e4m3",)),
            ("activation_scheme", raw.get("activation_scheme", "dynamic"), ("dynamic",)),
        ):
            if value not in known:
                raise ConfigError(
                    lines(
                        f"{self.source}: quantization_config.{name}={value!r} is not supported",
                        asked=", ".join(known),
                        try_="use a checkpoint in the release's FP8 and FP4 formats, or a bfloat16 one",
                    )
                )
        block = raw.get("weight_block_size") or [128, 128]
        if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)):
            raise ConfigError(
                lines(
                    f"{self.source}: quantization_config.weight_block_size must be two integers, found {block!r}",
                    try_="correct config.json; every DeepSeek-V4 release has [128, 128]",
                )
            )
        ue8m0 = raw.get("scale_fmt") == "ue8m0"
        return Quantization(scale_fmt="ue8m0" if ue8m0 else "float32", weight_block_size=(block[0], block[1]))

    def _expert_dtype(self, quantization: Quantization | None) -> str:
        nested = self.raw.get("quantization_config") or {}
        stated = self.raw.get("expert_dtype", nested.get("expert_dtype"))
        if str(nested.get("moe_quant_algo", "")).upper() == "NVFP4":
            stated = "nvfp4"
        if stated is None:
            return self._dtype() if quantization is None else "fp8"
        return _EXPERT_DTYPES.get(str(stated).lower(), str(stated))

    def _dtype(self) -> str:
        stated = self.raw.get("torch_dtype") or self.raw.get("dtype") or DeepseekV4Config.dtype
        return {"fp8": "bfloat16", "bf16": "bfloat16"}.get(str(stated), str(stated))
