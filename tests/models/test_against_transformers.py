"""The model against Transformers' deepseek_v4, an implementation that shares no line with ours."""

from __future__ import annotations

import re

import pytest
import torch

from halocline.hal.formats import recipe
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.weight_source import MappingSource

NUM_TOKENS = 300
VOCABULARY = 200
CHUNKINGS = {
    "one prefill": [300],
    "odd chunks": [7, 1, 60, 1, 128, 3, 70, 30],
    "130, then single steps": [130] + [1] * 170,
    "single steps": [1] * 300,
}

_NAMES = [
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.norm\.", "norm."),
    (r"^model\.hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"^model\.layers\.", "layers."),
    (r"\.attn_hc\.(fn|base|scale)$", r".hc_attn_\1"),
    (r"\.ffn_hc\.(fn|base|scale)$", r".hc_ffn_\1"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.sinks$", ".attn.attn_sink"),
    (r"\.self_attn\.q_a_proj\.", ".attn.wq_a."),
    (r"\.self_attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.self_attn\.q_b_proj\.", ".attn.wq_b."),
    (r"\.self_attn\.kv_proj\.", ".attn.wkv."),
    (r"\.self_attn\.kv_norm\.", ".attn.kv_norm."),
    (r"\.self_attn\.o_a_proj\.", ".attn.wo_a."),
    (r"\.self_attn\.o_b_proj\.", ".attn.wo_b."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj\.", ".attn.indexer.weights_proj."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.compressor\.", ".attn.compressor."),
    (r"compressor\.kv_proj\.", "compressor.wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"compressor\.position_bias$", "compressor.ape"),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".ffn.gate.bias"),
    (r"\.mlp\.gate\.", ".ffn.gate."),
    (r"\.mlp\.shared_experts\.gate_proj\.", ".ffn.shared_experts.w1."),
    (r"\.mlp\.shared_experts\.up_proj\.", ".ffn.shared_experts.w3."),
    (r"\.mlp\.shared_experts\.down_proj\.", ".ffn.shared_experts.w2."),
]


def _release_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in state.items():
        found = re.match(r"^model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj$", name)
        if found:
            layer, part = found.groups()
            for expert, matrix in enumerate(tensor):
                prefix = f"layers.{layer}.ffn.experts.{expert}"
                if part == "down":
                    renamed[f"{prefix}.w2.weight"] = matrix
                else:
                    renamed[f"{prefix}.w1.weight"], renamed[f"{prefix}.w3.weight"] = matrix.chunk(2)
            continue
        renamed[_release_name(name)] = tensor
    return renamed


def _release_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _oracle(seed: int) -> torch.nn.Module:
    """Transformers' model with the shapes of the tiny preset and every parameter non-trivial."""
    from transformers import DeepseekV4Config as TheirConfig
    from transformers import DeepseekV4ForCausalLM

    ours = TINY.replace(vocab_size=VOCABULARY)
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(TheirConfig(**ours.to_dict(dialect="transformers"))).eval().float()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.endswith("tid2eid"):
                ids = torch.stack([torch.randperm(8)[:3] for _ in range(VOCABULARY)])
                parameter.copy_(ids)
            elif name.endswith(("norm.weight", "layernorm.weight", "scale")):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith(("base", "sinks", "position_bias", "correction_bias")):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module", params=[0, 1, 2])
def case(request: pytest.FixtureRequest, reference_ops):
    oracle = _oracle(request.param)
    ids = torch.randint(2, VOCABULARY, (NUM_TOKENS,))
    with torch.no_grad():
        expected = oracle(ids[None]).logits[0]
    model = DeepseekV4Model(
        TINY.replace(vocab_size=VOCABULARY),
        recipe("float32"),
        lambda layer: reference_ops,
        MappingSource(tensors=_release_names(dict(oracle.state_dict()))),
        max_positions=512,
        with_draft=False,
    )
    return model, ids, expected


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
def test_logits_equal_transformers_in_any_chunking(case, chunks, make_sequences) -> None:
    model, ids, expected = case
    sequences = make_sequences(window_page_rows=16, page_tokens=128, capacity=384)
    plan = model.cache_plan(window_page_rows=16, page_tokens=128)
    cache = model.allocate_cache(
        plan,
        num_window_pages=sequences.num_window_pages,
        num_token_pages=sequences.num_token_pages,
        num_state_slots=1,
    )
    logits = []
    with torch.no_grad():
        for chunk in ids.split(chunks):
            batch = sequences.feed([chunk], num_decode=int(len(chunk) == 1))
            step = model.plan_step(batch, plan.geometry, reuse=None)
            logits.append(model.compute_logits(model.forward(batch, step, cache).hidden_TD))
    found = torch.cat(logits)
    assert (found - expected).abs().max() <= 2e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
