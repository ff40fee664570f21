"""What makes a DeepSeek-V4 configuration possible: types, signs, divisibility, counts. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halocline.models.deepseek_v4.config import DeepseekV4Config, DsparkConfig, Quantization

__all__ = ["EXPERT_DTYPES", "LAYER_KINDS", "find_problems"]

SLIDING_ATTENTION = "sliding_attention"
COMPRESSED_SPARSE_ATTENTION = "compressed_sparse_attention"
HEAVILY_COMPRESSED_ATTENTION = "heavily_compressed_attention"
LAYER_KINDS = {0: SLIDING_ATTENTION, 4: COMPRESSED_SPARSE_ATTENTION, 128: HEAVILY_COMPRESSED_ATTENTION}
EXPERT_DTYPES = ("fp4", "fp8", "nvfp4", "bfloat16", "float32")

# Values that every release shares and that the network has no other code for.
_ONLY = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "max_position_embeddings",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "rms_norm_eps",
    "routed_scaling_factor",
)


def find_problems(config: DeepseekV4Config) -> list[str]:
    """Lists everything that is impossible about a configuration, one sentence each."""
    return [*_check_types(config)] or [*_check_values(config)]


def _check_types(part: object, prefix: str = "") -> Iterator[str]:
    """Compares each field with its annotation; nested parts included. JSON's `true` is no integer."""
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        name, value = f"{prefix}{field.name}", getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from _check_types(value, f"{name}.")
        elif field.type == "int" and not _is_integer(value):
            yield f"{name} must be an integer, found {value!r}"
        elif field.type == "float" and not _is_number(value):
            yield f"{name} must be a finite number, found {value!r}"
        elif field.type == "bool" and not isinstance(value, bool):
            yield f"{name} must be true or false, found {value!r}"
        elif str(field.type).startswith("tuple[int") and not all(_is_integer(item) for item in value):
            yield f"{name} must be a list of integers, found {list(value)!r}"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _check_values(config: DeepseekV4Config) -> Iterator[str]:
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            yield f"{name} must be above 0, found {getattr(config, name)}"
    for name in ("num_hash_layers", "num_nextn_predict_layers", "swiglu_limit"):
        if not getattr(config, name) >= 0:
            yield f"{name} must not be negative, found {getattr(config, name)}"
    for name, only in _ONLY.items():
        if getattr(config, name) != only:
            yield f"{name} must be {only!r} as in every release, found {getattr(config, name)!r}"
    yield from _check_attention(config)
    yield from _check_moe(config)
    yield from _check_ratios(config)
    yield from _check_rope(config)
    yield from _check_tokens(config)
    if config.dspark:
        yield from _check_dspark(config, config.dspark)


def _check_attention(config: DeepseekV4Config) -> Iterator[str]:
    c = config
    if c.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim must be even (lanes rotate in pairs), found {c.qk_rope_head_dim}"
    for name in ("head_dim", "index_head_dim"):
        if getattr(c, name) < c.qk_rope_head_dim:
            yield f"{name}={getattr(c, name)} is smaller than qk_rope_head_dim={c.qk_rope_head_dim}"
    if c.o_groups > 0 and c.num_attention_heads % c.o_groups:
        yield f"num_attention_heads={c.num_attention_heads} is not divisible by o_groups={c.o_groups}"
    if c.index_head_dim > 0 and c.index_head_dim & (c.index_head_dim - 1):
        yield f"index_head_dim must be a power of two (it is Hadamard-rotated), found {c.index_head_dim}"


def _check_moe(config: DeepseekV4Config) -> Iterator[str]:
    c = config
    if c.num_experts_per_tok > c.n_routed_experts:
        yield f"num_experts_per_tok={c.num_experts_per_tok} exceeds n_routed_experts={c.n_routed_experts}"
    if c.num_hash_layers > c.num_hidden_layers:
        yield f"num_hash_layers={c.num_hash_layers} exceeds num_hidden_layers={c.num_hidden_layers}"
    if c.expert_dtype not in EXPERT_DTYPES:
        yield f"expert_dtype must be one of {', '.join(EXPERT_DTYPES)}, found {c.expert_dtype!r}"
    group = {"fp4": 32, "nvfp4": 16, "fp8": 128}.get(c.expert_dtype, 1)
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(c, name) % group:
            yield f"{name}={getattr(c, name)} is not a multiple of {group}, the scale group of {c.expert_dtype} experts"
    if c.quantization is None and c.expert_dtype not in ("bfloat16", "float32"):
        yield f"expert_dtype={c.expert_dtype!r} needs a quantization_config, found none"
    if c.quantization is not None:
        yield from _check_quantization(c.quantization)


def _check_quantization(quantization: Quantization) -> Iterator[str]:
    if quantization.weight_block_size != (128, 128):
        yield f"weight_block_size must be [128, 128] as in every release, found {list(quantization.weight_block_size)}"
    if quantization.scale_fmt not in ("ue8m0", "float32"):
        yield f"scale_fmt must be ue8m0 or float32, found {quantization.scale_fmt!r}"


def _check_ratios(config: DeepseekV4Config) -> Iterator[str]:
    c = config
    wrong = sorted({ratio for ratio in c.compress_ratios if ratio not in LAYER_KINDS})
    if wrong:
        yield f"compress_ratios may hold 0, 4 and 128, found {wrong}"
    drafts = len(c.dspark.target_layer_ids) if c.dspark else c.num_nextn_predict_layers
    if len(c.compress_ratios) != c.num_hidden_layers + drafts:
        kind = "DSpark stages" if c.dspark else "MTP layers"
        yield (
            f"compress_ratios has {len(c.compress_ratios)} entries, expected {c.num_hidden_layers + drafts}: "
            f"{c.num_hidden_layers} layers and {drafts} {kind}"
        )
    elif any(c.draft_ratios):
        yield f"draft layers have no compressor: their compress_ratios must be 0, found {list(c.draft_ratios)}"


def _check_rope(config: DeepseekV4Config) -> Iterator[str]:
    yarn = config.rope_scaling
    for name, theta in (("rope_theta", config.rope_theta), ("compress_rope_theta", config.compress_rope_theta)):
        if not theta > 1:
            yield f"{name} must be above 1, found {theta}"
    if not yarn.factor >= 1:
        yield f"rope_scaling.factor must be at least 1, found {yarn.factor}"
    if not 0 < yarn.beta_slow < yarn.beta_fast:
        yield f"rope_scaling needs 0 < beta_slow < beta_fast, found {yarn.beta_slow} and {yarn.beta_fast}"
    if not yarn.original_max_position_embeddings > 0:
        found = yarn.original_max_position_embeddings
        yield f"rope_scaling.original_max_position_embeddings must be above 0, found {found}"


def _check_tokens(config: DeepseekV4Config) -> Iterator[str]:
    ids = {"bos_token_id": (config.bos_token_id,), "eos_token_id": config.eos_token_ids}
    if not config.eos_token_ids:
        yield "eos_token_id is empty: generation would never stop"
    for name, values in ids.items():
        for value in values:
            if not 0 <= value < config.vocab_size:
                yield f"{name}={value} is outside the vocabulary of {config.vocab_size}"
    if config.dtype not in ("bfloat16", "float32"):
        yield f"torch_dtype must be bfloat16 or float32, found {config.dtype!r}"


def _check_dspark(config: DeepseekV4Config, dspark: DsparkConfig) -> Iterator[str]:
    if dspark.block_size < 1 or dspark.markov_rank < 1:
        yield (
            "dspark_block_size and dspark_markov_rank must be above 0, "
            f"found {dspark.block_size} and {dspark.markov_rank}"
        )
    if not 0 <= dspark.noise_token_id < config.vocab_size:
        yield f"dspark_noise_token_id={dspark.noise_token_id} is outside the vocabulary of {config.vocab_size}"
    targets, layers = dspark.target_layer_ids, config.num_hidden_layers
    increasing = list(targets) == sorted(set(targets))
    if not targets or not increasing or targets[0] < 0 or targets[-1] >= layers:
        yield f"dspark_target_layer_ids must be increasing numbers of layers below {layers}, found {list(targets)}"
