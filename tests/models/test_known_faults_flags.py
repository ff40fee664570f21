"""No setting is accepted that nothing reads: each field changes the answer or the files, or is refused.

The table below must name every field, so that a new one cannot slip in unread.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.errors import ConfigError
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.models.deepseek_v4.config import DeepseekV4Config, DsparkConfig, Quantization, YarnScaling
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.weight_source import MappingSource

CONFIG = TINY.unquantized("float32")
YARN = CONFIG.rope_scaling

# Same tensors, another answer.
ANSWERS: dict[str, Any] = {
    "qk_rope_head_dim": 32,
    "sliding_window": 20,
    "rope_theta": 20000.0,
    "compress_rope_theta": 80000.0,
    "rope_scaling.factor": 4.0,
    "rope_scaling.beta_fast": 8.0,
    "rope_scaling.beta_slow": 4.0,
    "rope_scaling.original_max_position_embeddings": 1024,
    "index_topk": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.0,
    "swiglu_limit": 0.5,
    "clamp_shared_expert": False,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-2,
    "rms_norm_eps": 1e-2,
}
# Other tensors, so that a checkpoint of the unchanged configuration is refused.
FILES: dict[str, Any] = {
    "vocab_size": 768,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "head_dim": 256,
    "q_lora_rank": 64,
    "o_groups": 4,
    "o_lora_rank": 32,
    "compress_ratios": (0, 4, 128, 4, 4, 0, 0),
    "index_n_heads": 32,
    "index_head_dim": 128,
    "n_routed_experts": 16,
    "moe_intermediate_size": 64,
    "num_hash_layers": 3,
    "hc_mult": 2,
    "expert_dtype": "nvfp4",
    "quantization": Quantization(scale_fmt="float32"),
    "dspark": DsparkConfig(block_size=2, noise_token_id=3, target_layer_ids=(1,), markov_rank=4),
    "dtype": "float32",
}
# What has to change along, or what shows the change.
ALONG: dict[str, dict[str, Any]] = {"num_hidden_layers": {"compress_ratios": (0, 4, 128, 4, 128, 0)}}
BASES: dict[str, dict[str, Any]] = {"dtype": {"quantization": None, "expert_dtype": "bfloat16"}}
# One value only; any other is refused by name.
REFUSED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "n_shared_experts": 2,
    "hidden_act": "gelu",
    "scoring_func": "sigmoid",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
    "attention_bias": True,
}
# Read by others, with tests of their own: limits and special tokens by the engine, the depth by the draft layers.
ELSEWHERE = {"max_position_embeddings", "bos_token_id", "eos_token_ids", "num_nextn_predict_layers"}


def changed(config: DeepseekV4Config, field: str, value: Any) -> DeepseekV4Config:
    outer, _, inner = field.partition(".")
    return config.replace(**{outer: dataclasses.replace(YARN, **{inner: value}) if inner else value})


def test_every_field_has_its_place() -> None:
    named = [{name.partition(".")[0] for name in group} for group in (ANSWERS, FILES, REFUSED, ELSEWHERE)]
    assert set().union(*named) == {field.name for field in dataclasses.fields(DeepseekV4Config)}
    assert sum(map(len, named)) == len(set().union(*named))
    inner = {name.partition(".")[2] for name in ANSWERS if name.startswith("rope_scaling.")}
    assert inner == {field.name for field in dataclasses.fields(YarnScaling)}


@pytest.fixture(scope="module")
def answer(reference_ops: Ops, make_sequences: Any) -> Any:
    """Logits of 150 tokens (a closed block of each ratio, a pruned indexer) from one set of tensors."""
    tensors = dict(RandomWeights(CONFIG, seed=2))
    ids = torch.randint(2, 500, (150,), generator=torch.Generator().manual_seed(0))

    def logits(config: DeepseekV4Config) -> Tensor:
        model = DeepseekV4Model(
            config, recipe("float32"), lambda layer: reference_ops, MappingSource(tensors=tensors), max_positions=256,
            with_draft=False,
        )  # fmt: skip
        sequences = make_sequences(window_page_rows=16, page_tokens=128, capacity=256)
        plan = model.cache_plan(window_page_rows=16, page_tokens=128)
        cache = model.allocate_cache(plan, num_window_pages=16, num_token_pages=2, num_state_slots=1)
        batch = sequences.feed([ids])
        step = model.plan_step(batch, plan.geometry, reuse=None)
        with torch.no_grad():
            return model.compute_logits(model.forward(batch, step, cache).hidden_TD)

    return logits


@pytest.fixture(scope="module")
def unchanged(answer: Any) -> Tensor:
    return answer(CONFIG)


def test_the_same_configuration_gives_the_same_bits(answer: Any, unchanged: Tensor) -> None:
    assert torch.equal(answer(CONFIG.replace()), unchanged)


@pytest.mark.parametrize("field", ANSWERS)
def test_a_field_changes_the_answer(answer: Any, unchanged: Tensor, field: str) -> None:
    found = answer(changed(CONFIG, field, ANSWERS[field]))
    assert found.isfinite().all()
    assert (found - unchanged).abs().max() > 1e-4


@pytest.mark.parametrize("field", FILES)
def test_a_field_changes_what_the_files_must_hold(field: str) -> None:
    config = TINY.replace(**BASES.get(field, {}))
    found = plan_weights(config.replace(**{field: FILES[field], **ALONG.get(field, {})}))
    assert found.tensors != plan_weights(config).tensors


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_allows_one_value_refuses_another(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .* as in every release, found"):
        TINY.replace(**{field: REFUSED[field]})
