"""Part of a GPU session: Transformers' DeepSeek-V4 on the same four layers in the same run, step by step in turn."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from halocline.benchmarks import device_clock
from halocline.benchmarks.decode_step import DecodeStep, random_model
from halocline.benchmarks.gpu_engine import kernel_flags

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["peer"]

_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _their_model(config: DeepseekV4Config, device: str) -> Any:
    """Their network with random bfloat16 weights, made on the device."""
    from transformers import initialization
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config as Theirs
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    yarn, partial = config.rope_scaling, config.qk_rope_head_dim / config.head_dim
    theirs = Theirs(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        sliding_window=config.sliding_window,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.index_topk,
        n_routed_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        layer_types=[_KINDS[ratio] for ratio in config.compress_ratios],
        mlp_layer_types=["hash_moe", *["moe"] * (config.num_hidden_layers - 1)],
        dtype="bfloat16",
    )
    theirs.rope_parameters = {
        "main": {
            "rope_type": "default",
            "rope_theta": float(config.rope_theta),
            "partial_rotary_factor": partial,
        },
        "compress": {
            "rope_type": "yarn",
            "rope_theta": float(config.compress_rope_theta),
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "attention_factor": 1.0,
            "partial_rotary_factor": partial,
        },
    }
    known = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), initialization.no_init_weights():
            model = DeepseekV4ForCausalLM(theirs)
    finally:
        torch.set_default_dtype(known)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for name, buffer in model.named_buffers():
            if "tid2eid" in name:
                buffer.copy_(torch.randint(0, config.n_routed_experts, buffer.shape, device=buffer.device))
    model.train(False)
    return model


class _TheirSteps:
    """Greedy decoding with their cache: each call is one step."""

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        self._model = model
        self._last = model(input_ids=prompt, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def __call__(self) -> None:
        token = self._last.logits[:, -1:].argmax(-1)
        self._last = self._model(input_ids=token, past_key_values=self._last.past_key_values, use_cache=True)

    @property
    def is_finite(self) -> bool:
        return bool(self._last.logits.isfinite().all())


def _wall(run: Callable[[], None], times: int) -> list[float]:
    """Milliseconds of calls, each waited for, by the host's clock."""
    found = []
    for _ in range(times):
        device_clock.settle()
        start = time.perf_counter()
        run()
        device_clock.settle()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def peer(rows: Rows, options: argparse.Namespace) -> None:
    """Both at batch 1 behind the same prompt: rounds of five steps in turn, in both orders, by one clock.

    Ours is what the engine does for a step but sampling: the plan is refreshed, then the graph is replayed.
    """
    sizes, prompt = options.sizes, options.sizes.peer_prompt
    config = sizes.flash.replace(
        num_hidden_layers=len(sizes.all_kinds),
        compress_ratios=sizes.all_kinds,
        num_hash_layers=1,
        num_nextn_predict_layers=0,
    )
    params = {"layers": config.num_hidden_layers, "batch": 1, "context": prompt}
    with rows.guard("peer", **params):
        start = time.perf_counter()
        model, _ = random_model(config, kernel_flags("default"), max_positions=prompt + 256)
        step = DecodeStep(model, batch=1, max_positions=prompt + 256)
        step.place([prompt + 1])
        replay, _ = step.capture()

        def ours() -> None:
            step.place([prompt + 1])
            replay()

        with torch.no_grad():
            theirs = _their_model(config, model.device)
            ids = torch.randint(0, config.vocab_size, (1, prompt), device=model.device)
            steps = _TheirSteps(theirs, ids)
        rows.add("peer.ready", round(time.perf_counter() - start, 1), "s", params=params)
        _wall(ours, 3)
        _wall(steps, 3)
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(max(sizes.rounds // 5, 2)):
            order: list[tuple[str, Callable[[], None]]] = [("ours", ours), ("theirs", steps)]
            for name, run in order if turn % 2 == 0 else reversed(order):
                found[name] += _wall(run, 5)
        mine, others = (device_clock.median(sorted(found[name])) for name in ("ours", "theirs"))
        rows.add("peer.ours", round(mine, 3), "ms", params=params)
        rows.add("peer.theirs", round(others, 3), "ms", params={**params, "finite": steps.is_finite})
        rows.add("peer.factor", round(others / mine, 2), "x faster", params=params)
