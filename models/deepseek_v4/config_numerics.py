"""The parts of config.json that dialects spell differently: rotary tables, number formats, layer kinds, drafts."""

from __future__ import annotations

from typing import Any

from halocline.models.deepseek_v4.config import LAYER_KINDS, DeepseekV4Config, DsparkConfig, Quantization, YarnScaling
from halocline.models.deepseek_v4.config_reading import Reading

__all__ = [
    "read_dspark",
    "read_dtype",
    "read_expert_dtype",
    "read_hash_layers",
    "read_quantization",
    "read_ratios",
    "read_rope_width",
    "read_ropes",
]

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
# Facts of YaRN: name inside rope_scaling or rope_parameters, and the vendor's short name.
_YARN = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}
_DSPARK = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")


def read_rope_width(reading: Reading) -> Any:
    """Width of the rotary part, stated as such or as a share of the head."""
    main = reading.table("rope_parameters").get("main")
    factor = reading.get("partial_rotary_factor")
    if factor is None and isinstance(main, dict):
        factor = main.get("partial_rotary_factor")
    head_dim = reading.get("head_dim")
    if factor is not None and not (isinstance(factor, (int, float)) and 0 < factor <= 1):
        reading.refuse(
            f"partial_rotary_factor must be a share of the head, found {factor!r}",
            asked="a number above 0, at most 1",
            hint="correct partial_rotary_factor in config.json",
        )
    derived = round(factor * head_dim) if factor is not None and isinstance(head_dim, int) else None
    return reading.first("qk_rope_head_dim", reading.get("qk_rope_head_dim"), derived)


def read_ropes(reading: Reading) -> dict[str, Any]:
    """Both rotary tables, from flat fields, `rope_scaling`, or flat or nested `rope_parameters`."""
    parameters = reading.table("rope_parameters")
    nested = [parameters.get(key) for key in ("main", "compress")]
    main = nested[0] if isinstance(nested[0], dict) else {}
    compress = nested[1] if isinstance(nested[1], dict) else {}
    main_type = main.get("rope_type", main.get("type", "default"))
    reading.agree("the rotary table of sliding layers", "rope_parameters.main", main_type, "every release", "default")
    flat = {key: value for key, value in parameters.items() if not isinstance(value, dict)}
    yarn = {**flat, **compress, **reading.table("rope_scaling")}
    return {
        "rope_theta": reading.first("rope_theta", reading.get("rope_theta"), main.get("rope_theta")),
        "compress_rope_theta": reading.first(
            "compress_rope_theta", reading.get("compress_rope_theta"), compress.get("rope_theta")
        ),
        "rope_scaling": _read_yarn(reading, yarn),
    }


def _read_yarn(reading: Reading, stated: dict[str, Any]) -> YarnScaling | None:
    kind = stated.get("rope_type", stated.get("type"))
    if kind == "default":
        length = reading.get("max_position_embeddings") or DeepseekV4Config.max_position_embeddings
        return YarnScaling(factor=1.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=length)
    if kind not in (None, "yarn"):
        reading.refuse(
            f"rope scaling of type {kind!r} is not DeepSeek-V4's",
            asked="type yarn, or an explicit default",
            hint="correct rope_scaling in config.json",
        )
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        if stated.get(name) not in (None, 0, 1):
            reading.refuse(
                f"rope_scaling.{name}={stated[name]}: DeepSeek-V4 has no magnitude factor",
                hint=f"remove {name} from config.json",
            )
    values = {name: stated.get(name, reading.get(short)) for name, short in _YARN.items()}
    absent = [f"rope_scaling.{name}" for name, value in values.items() if value is None]
    reading.missing.extend(absent)
    return None if absent else YarnScaling(**values)


def read_hash_layers(reading: Reading) -> Any:
    """Number of layers that route by token id, stated as such or as `mlp_layer_types`."""
    types = reading.get("mlp_layer_types")
    if types is None:
        return reading.need("num_hash_layers")
    hashed = types.count("hash_moe")
    if types != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed):
        reading.refuse(
            "mlp_layer_types must be hash_moe layers followed by moe layers",
            found=", ".join(map(str, types)),
            hint="correct mlp_layer_types in config.json",
        )
    layers = reading.get("num_hidden_layers")
    reading.agree("the number of layers", "mlp_layer_types", len(types), "num_hidden_layers", layers)
    return reading.first("num_hash_layers", hashed, reading.get("num_hash_layers"))


def read_ratios(reading: Reading, dspark: DsparkConfig | None) -> dict[str, Any]:
    """The ratio of each layer and how many draft layers follow the main ones."""
    ratios, from_types, layers = (
        reading.get("compress_ratios"),
        _ratios_of_types(reading),
        reading.get("num_hidden_layers"),
    )
    if ratios is None and from_types is None:
        reading.missing.append("compress_ratios")
        return {"num_nextn_predict_layers": 0}
    if ratios is None:  # the Transformers dialect has no draft layers, whatever num_nextn_predict_layers says
        return {"compress_ratios": from_types, "num_nextn_predict_layers": 0, "dspark": None}
    ratios = tuple(ratios)
    main = ratios[:layers] if isinstance(layers, int) else ratios
    if from_types is not None:
        reading.agree("the kinds of layers", "compress_ratios", main, "layer_types", from_types[: len(main)])
    declared = reading.get("num_nextn_predict_layers")
    if dspark is not None:
        declared = 1  # what every DSpark file says; the vendor's short dialect counts stages there
    elif declared is None:
        declared = len(ratios) - len(main)
    elif declared == 0:
        ratios = main  # draft layers were taken out of the checkpoint, their ratios left behind
    return {"compress_ratios": ratios, "num_nextn_predict_layers": declared}


def _ratios_of_types(reading: Reading) -> tuple[int, ...] | None:
    rates = {kind: ratio for ratio, kind in LAYER_KINDS.items()}
    stated = dict(reading.table("compress_rates"))
    for key, ratio in (("compress_rate_csa", 4), ("compress_rate_hca", 128)):
        if reading.get(key) is not None:
            stated[LAYER_KINDS[ratio]] = reading.get(key)
    for kind, ratio in stated.items():
        reading.agree(f"the compress ratio of {kind}", "compress_rates", ratio, "DeepSeek-V4", rates.get(kind))
    types = reading.get("layer_types")
    if types is None:
        return None
    unknown = sorted({str(kind) for kind in types if kind not in rates})
    if unknown:
        reading.refuse(
            f"unknown layer_types: {', '.join(unknown)}",
            asked=", ".join(rates),
            hint="correct layer_types in config.json",
        )
    return tuple(rates[kind] for kind in types)


def read_dspark(reading: Reading) -> DsparkConfig | None:
    """The block drafter: all four of its fields, or none."""
    if all(reading.get(name) is None for name in _DSPARK):
        return None
    block, noise, targets, rank = (reading.need(name) for name in _DSPARK)
    if None in (block, noise, targets, rank):
        return None
    return DsparkConfig(block_size=block, noise_token_id=noise, target_layer_ids=tuple(targets), markov_rank=rank)


def read_quantization(reading: Reading) -> Quantization | None:
    """Block quantisation, from `quantization_config` or from the vendor's short fields.

    Without `scale_fmt` the scales are float32, as in the base checkpoints.
    """
    stated = reading.get("quantization_config")
    if stated is None and reading.get("dtype") == "fp8":
        stated = {"scale_fmt": reading.get("scale_fmt")}
    if stated is None:
        return None
    for name, value, known in (
        ("quant_method", stated.get("quant_method", "fp8"), ("fp8", "modelopt", "modelopt_mixed")),
        ("fmt", stated.get("fmt", "e4m3"), ("e4m3",)),
        ("activation_scheme", stated.get("activation_scheme", "dynamic"), ("dynamic",)),
        ("scale_fmt", stated.get("scale_fmt"), (None, "ue8m0", "float32")),
    ):
        if value not in known:
            reading.refuse(
                f"quantization_config.{name}={value!r} is not supported",
                asked=", ".join(map(str, known)),
                hint="use a checkpoint in the release's FP8 and FP4 formats, or a bfloat16 one",
            )
    block = stated.get("weight_block_size", [128, 128])
    if not isinstance(block, list):
        reading.refuse(f"weight_block_size must be a list, found {block!r}", hint="correct config.json")
    return Quantization(scale_fmt=stated.get("scale_fmt") or "float32", weight_block_size=tuple(block))


def read_expert_dtype(reading: Reading, quantization: Quantization | None) -> str:
    """Storage of the routed experts; where nothing is said they are like every other matrix."""
    nested = reading.table("quantization_config")
    stated = reading.get("expert_dtype") or nested.get("expert_dtype")
    if str(nested.get("moe_quant_algo")).upper() == "NVFP4":
        stated = "nvfp4"
    if stated is None:
        return read_dtype(reading) if quantization is None else "fp8"
    return _EXPERT_DTYPES.get(str(stated).lower(), str(stated))


def read_dtype(reading: Reading) -> str:
    """Element type of unquantised weights and of activations."""
    stated = reading.get("torch_dtype") or reading.get("dtype") or DeepseekV4Config.dtype
    return {"fp8": "bfloat16", "bf16": "bfloat16"}.get(str(stated), str(stated))
