"""The configuration of a DeepSeek-V4 model: what a config.json says, checked once.

Field names are those of the release's config.json. `config_dialects` reads and writes the files; this module
knows nothing of JSON. It is free of torch, so that planning and explaining stay light.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halocline.hal.errors import ConfigError, lines
from halocline.models.deepseek_v4.config_checks import COMPRESSED_SPARSE_ATTENTION, LAYER_KINDS, find_problems

__all__ = [
    "LAYER_KINDS",
    "DeepseekV4Config",
    "DsparkConfig",
    "Quantization",
    "RopeSettings",
    "YarnScaling",
]

ExpertDtype = Literal["fp4", "fp8", "nvfp4", "bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Long-context correction of the rotary frequencies of compressed layers. Factor 1 means none."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """The rotary table of one kind of layer: base, and YaRN or `None` for the plain table."""

    theta: float
    width: int
    yarn: YarnScaling | None


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Block quantisation of the linear weights: E4M3 with one scale for each block.

    Attributes:
        scale_fmt: `ue8m0` (exponent bytes) or `float32`.
        weight_block_size: Rows and columns that share a scale.
    """

    scale_fmt: Literal["ue8m0", "float32"] = "ue8m0"
    weight_block_size: tuple[int, int] = (128, 128)


@dataclass(frozen=True, kw_only=True)
class DsparkConfig:
    """The block drafter that later releases carry instead of the classic MTP layer."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config:
    """Everything that shapes a DeepSeek-V4 network and its arithmetic.

    Fields without a default differ within the family or change results silently, and must be stated. Fields
    with a default have that value in every release; a file that leaves one out means the release's value,
    never "off".

    Attributes:
        compress_ratios: Ratio of each main layer, then of each draft layer: 0, 4 or 128.
        swiglu_limit: Clamp inside the expert MLP; 0 switches it off and must be written to do so.
        clamp_shared_expert: Whether the shared expert is clamped like the routed ones.
        num_nextn_predict_layers: Depth of classic MTP as the file states it. Stays 1 in DSpark files.
        expert_dtype: Storage of the routed experts.
        quantization: Storage of the other linear weights; `None` when they are plain.
        dspark: The block drafter, or `None`.
        dtype: Element type of unquantised weights and of activations.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    expert_dtype: ExpertDtype
    quantization: Quantization | None
    num_nextn_predict_layers: int
    dspark: DsparkConfig | None = None
    max_position_embeddings: int = 1048576
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    hidden_act: str = "silu"
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    clamp_shared_expert: bool = True
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        """Refuses impossible values, all of them in one message."""
        problems = find_problems(self)
        if problems:
            summary = f"impossible deepseek_v4 configuration, {len(problems)} problem(s)"
            found = {f"problem {number}": problem for number, problem in enumerate(problems, 1)}
            raise ConfigError(lines(summary, **found, try_="correct config.json, or copy it again from the release"))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, source: str = "config") -> DeepseekV4Config:
        """Reads a parsed config.json in the release's, the vendor's short or Transformers' dialect.

        Args:
            raw: The parsed JSON object.
            source: Name for messages, usually the path.

        Raises:
            ConfigError: If it is another model, incomplete or impossible.
        """
        from halocline.models.deepseek_v4.config_dialects import parse

        return parse(raw, source=source)

    @classmethod
    def from_file(cls, path: str | Path) -> DeepseekV4Config:
        """Reads a config.json or a folder that holds one.

        Raises:
            ConfigError: If there is no such file, it is not JSON, or `from_dict` refuses it.
        """
        from halocline.models.config_file import read_config_file

        raw, file = read_config_file(path)
        return cls.from_dict(raw, source=str(file))

    def to_dict(self, *, dialect: Literal["release", "transformers"] = "release") -> dict[str, Any]:
        """Returns what config.json holds in a dialect; `from_dict` of it gives an equal object.

        The Transformers dialect has no draft layers: they are dropped.
        """
        from halocline.models.deepseek_v4.config_writer import to_release, to_transformers

        return to_release(self) if dialect == "release" else to_transformers(self)

    def replace(self, **changes: Any) -> DeepseekV4Config:
        """Returns a changed, newly validated copy."""
        return dataclasses.replace(self, **changes)

    def without_draft(self) -> DeepseekV4Config:
        """The main network alone."""
        return self.replace(compress_ratios=self.main_ratios, num_nextn_predict_layers=0, dspark=None)

    def unquantized(self, dtype: Literal["bfloat16", "float32"]) -> DeepseekV4Config:
        """The same network with every matrix stored plainly; in float32 all other floats as well."""
        return self.replace(dtype=dtype, quantization=None, expert_dtype=dtype)

    @property
    def nope_head_dim(self) -> int:
        """Lanes of a head that are not rotated; the rotary lanes follow them."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one group of the output projection."""
        return self.num_attention_heads // self.o_groups

    @property
    def main_ratios(self) -> tuple[int, ...]:
        """Compress ratio of each main layer."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def draft_ratios(self) -> tuple[int, ...]:
        """Compress ratio of each draft layer (MTP layer or DSpark stage)."""
        return self.compress_ratios[self.num_hidden_layers :]

    @property
    def num_mtp_layers(self) -> int:
        """Classic MTP layers; 0 in a DSpark model."""
        return 0 if self.dspark else len(self.draft_ratios)

    @property
    def num_dspark_stages(self) -> int:
        """DSpark stages; 0 in a model with classic MTP."""
        return len(self.draft_ratios) if self.dspark else 0

    def layer_kind(self, layer: int) -> str:
        """Attention kind of a layer; draft layers count on from `num_hidden_layers`."""
        return LAYER_KINDS[self.compress_ratios[layer]]

    def is_hash_routed(self, layer: int) -> bool:
        """Whether a layer routes by token id. Draft layers never do."""
        return layer < self.num_hash_layers

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer selects among its compressed entries; layers of ratio 128 see all of theirs."""
        return self.layer_kind(layer) == COMPRESSED_SPARSE_ATTENTION

    def compressor_series(self, ratio: int) -> int:
        """Series that a compressor keeps for each token: two when its blocks overlap (ratio 4), else one."""
        return 2 if LAYER_KINDS[ratio] == COMPRESSED_SPARSE_ATTENTION else 1

    def rope_for(self, ratio: int) -> RopeSettings:
        """The rotary table of layers with a compress ratio: plain for 0, compressed base with YaRN otherwise."""
        if ratio == 0:
            return RopeSettings(theta=self.rope_theta, width=self.qk_rope_head_dim, yarn=None)
        return RopeSettings(theta=self.compress_rope_theta, width=self.qk_rope_head_dim, yarn=self.rope_scaling)
