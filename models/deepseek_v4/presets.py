"""The released configurations and the small ones that `halocline make-model` writes, as data.

Released values are those of the public config.json files. `tiny` crosses every boundary of the network in
300 tokens; `vendor-tiny` is the smallest geometry that every vendor kernel takes without padding.
"""

from __future__ import annotations

from halocline.hal.errors import ConfigError
from halocline.models.deepseek_v4.config import DeepseekV4Config, DsparkConfig, Quantization, YarnScaling

__all__ = ["PRESETS", "first_layers", "preset"]

_RELEASE_YARN = YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)

FLASH = DeepseekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_scaling=_RELEASE_YARN,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    num_hash_layers=3,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    expert_dtype="fp4",
    quantization=Quantization(),
    num_nextn_predict_layers=1,
)

FLASH_0731 = FLASH.replace(
    compress_ratios=(*FLASH.main_ratios, 0, 0, 0),
    dspark=DsparkConfig(block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), markov_rank=256),
)

PRO = FLASH.replace(
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
    index_topk=1024,
    n_routed_experts=384,
    moe_intermediate_size=3072,
    routed_scaling_factor=2.5,
)

PRO_0813 = PRO.replace(
    compress_ratios=(*PRO.main_ratios, 0, 0, 0),
    dspark=DsparkConfig(block_size=5, noise_token_id=128799, target_layer_ids=(58, 59, 60), markov_rank=512),
)

TINY = FLASH.replace(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=8,
    head_dim=128,
    q_lora_rank=48,
    o_groups=2,
    o_lora_rank=16,
    sliding_window=24,
    compress_ratios=(0, 4, 128, 4, 128, 0, 0),
    rope_scaling=YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=128),
    max_position_embeddings=2048,
    index_n_heads=16,
    index_head_dim=64,
    index_topk=8,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    num_hash_layers=2,
    swiglu_limit=0.6,
)

VENDOR_TINY = FLASH.replace(
    vocab_size=1024,
    hidden_size=256,
    num_hidden_layers=5,
    num_attention_heads=4,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    compress_ratios=(0, 4, 128, 4, 128, 0),
    max_position_embeddings=65536,
    index_n_heads=32,
    index_topk=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    num_hash_layers=1,
)

PRESETS = {
    "tiny": TINY,
    "vendor-tiny": VENDOR_TINY,
    "flash": FLASH,
    "flash-0731": FLASH_0731,
    "pro": PRO,
    "pro-0813": PRO_0813,
}


def preset(name: str) -> DeepseekV4Config:
    """Looks a configuration up by name.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def first_layers(config: DeepseekV4Config, layers: int) -> DeepseekV4Config:
    """The same model with its first layers only, and without draft layers; all of them if it has no more."""
    kept = min(layers, config.num_hidden_layers)
    return config.replace(
        num_hidden_layers=kept,
        compress_ratios=config.compress_ratios[:kept],
        num_hash_layers=min(config.num_hash_layers, kept),
        num_nextn_predict_layers=0,
        dspark=None,
    )
