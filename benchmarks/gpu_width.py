"""Part of a GPU session: four full-width layers of all kinds against the reference, position by position."""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from halocline.backends_reference.moe import experts_reference, prepare_experts_reference
from halocline.benchmarks.decode_step import DecodeStep, random_model
from halocline.benchmarks.gpu_engine import kernel_flags
from halocline.hal.ops.moe import Routing
from halocline.hal.probe import probe
from halocline.hal.settings import process_settings

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.benchmarks.gpu_rows import Rows
    from halocline.hal.formats import Weight
    from halocline.hal.ops import Ops
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["StoredExperts", "few_experts_at_a_time", "width"]

_TOGETHER = 32  # experts that are expanded to float32 at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredExperts:
    """Experts as they are stored; the reference expands all of them, which takes 26 GB a layer of Flash."""

    gate_up: Weight
    down: Weight
    activation: Literal["none", "fp8_group128"]

    @property
    def num_experts(self) -> int:
        """Experts held."""
        return self.gate_up.shape[0]


def _some(weight: Weight, chosen: Tensor) -> Weight:
    """Some matrices of a stack."""
    parts = {name: getattr(weight, name)[chosen] for name in ("data", "scale") if getattr(weight, name) is not None}
    return replace(weight, shape=(len(chosen), *weight.shape[1:]), **parts)


def _experts(x_TD: Tensor, routing: Routing, weights: StoredExperts, *, limit: float) -> Tensor:
    """The reference's formula, a few of the experts that were chosen at a time."""
    used = routing.ids_TK.unique()
    used = used[used >= 0]
    total_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for first in range(0, len(used), _TOGETHER):
        chosen = used[first : first + _TOGETHER].long()
        place_E = torch.full((weights.num_experts + 1,), -1, dtype=torch.int32, device=x_TD.device)
        place_E[chosen] = torch.arange(len(chosen), dtype=torch.int32, device=x_TD.device)
        ids_TK = place_E[routing.ids_TK.long()]  # an id of -1 reads the last place, which is -1
        expanded = prepare_experts_reference(
            _some(weights.gate_up, chosen), _some(weights.down, chosen), activation=weights.activation
        )
        total_TD += experts_reference(x_TD, Routing(ids_TK, routing.weights_TK), expanded, limit=limit).float()
    return total_TD.to(x_TD.dtype)


def _prepare(gate_up: Weight, down: Weight, *, activation: Literal["none", "fp8_group128"]) -> StoredExperts:
    return StoredExperts(gate_up=gate_up, down=down, activation=activation)


def few_experts_at_a_time(ops: Ops) -> Ops:
    """The same kernels, but for the experts, which stay as they are stored."""
    ops.moe.prepare_experts = _prepare  # type: ignore[assignment]
    ops.moe.experts = _experts  # type: ignore[assignment]
    return ops


def _config(options: argparse.Namespace) -> DeepseekV4Config:
    base: DeepseekV4Config = options.sizes.flash
    kinds = options.sizes.all_kinds
    return base.replace(
        num_hidden_layers=len(kinds), compress_ratios=kinds, num_hash_layers=1, num_nextn_predict_layers=0
    )


def width(rows: Rows, options: argparse.Namespace) -> None:
    """Logits of a prefill's last positions and of decode steps behind it, against the reference's.

    The reference computes in the same recipe, and once more in float32 throughout.
    """
    on_gpu = probe(process_settings()).is_gpu
    reference = ("*=reference",) if on_gpu else ()
    config = _config(options)
    expected = {}
    for recipe_name in ("served", "float32"):
        with rows.guard("width.reference", recipe=recipe_name):
            expected[recipe_name] = _logits(config, reference, recipe_name, options, few=True)
    for name in options.sets:
        with rows.guard("width", kernels=name):
            found = _logits(config, kernel_flags(name), "served", options, few=not on_gpu)
            for recipe_name, other in expected.items():
                for kind in found:
                    params = {"kernels": name, "against": recipe_name, "positions": kind}
                    _compare(rows, params, found[kind], other[kind])


def _compare(rows: Rows, params: dict[str, Any], found: Tensor, expected: Tensor) -> None:
    cosines = torch.nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1)
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    value = {
        "least": round(float(cosines.min()), 6),
        "mean": round(float(cosines.mean()), 6),
        "same_argmax": round(float(same), 4),
        "count": len(cosines),
        "finite": bool(found.isfinite().all()),
    }
    rows.add("width.cosine", value, "cosine", params=params)


def _logits(
    config: DeepseekV4Config, kernels: tuple[str, ...], recipe_name: str, options: argparse.Namespace, *, few: bool
) -> dict[str, Tensor]:
    """Logits on the host, of the last positions of a prefill and of as many decode steps behind it."""
    prompt, count = options.sizes.width_prompt, options.sizes.width_positions
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, config.vocab_size, (prompt + count,), generator=generator).tolist()
    model, _ = random_model(
        config,
        kernels,
        max_positions=prompt + count,
        recipe_name=recipe_name,
        change=few_experts_at_a_time if few else None,
    )
    step = DecodeStep(model, batch=1, max_positions=prompt + count, whole_windows=True)
    found = {"prefill": model.compute_logits(step.prefill(ids[:prompt])[-count:]).cpu()}
    singles = []
    for position in range(prompt, prompt + count):
        step.place([position + 1], [ids[position]])
        singles.append(step.logits().cpu())
    found["decode"] = torch.cat(singles)
    del model, step
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found
