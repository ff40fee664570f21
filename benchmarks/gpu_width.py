"""Part of a GPU session: four full-width layers of all kinds against the reference, position by position."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from halocline.backends_reference.moe import experts_reference, prepare_experts_reference
from halocline.benchmarks.decode_step import DecodeStep, random_model
from halocline.benchmarks.forced_run import ForcedModel, Kept, Part, equal_choices
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


@dataclass(frozen=True, eq=False, kw_only=True)
class _Run:
    """Logits on the host of a prefill's last positions and of as many decode steps, and what the layers did."""

    logits: dict[str, Tensor]
    kept: Kept
    logits_behind: dict[tuple[Part, str], Tensor]
    outputs: dict[tuple[Part, str], Tensor]


class _Subject:
    """Four layers with kernels and a recipe, to be run in several ways."""

    def __init__(
        self, kernels: tuple[str, ...], recipe_name: str, options: argparse.Namespace, *, few: bool = True
    ) -> None:
        config, self._sizes = _config(options), options.sizes
        self._length = self._sizes.width_prompt + self._sizes.width_positions
        model, _ = random_model(
            config,
            kernels,
            max_positions=self._length,
            recipe_name=recipe_name,
            change=few_experts_at_a_time if few else None,
        )
        self._forced, self._embed = ForcedModel(model), model.embed
        generator = torch.Generator().manual_seed(5)
        self._ids = torch.randint(0, config.vocab_size, (self._length,), generator=generator).tolist()

    def run(self, *, choices: _Run | None = None, streams: _Run | None = None, nudged: bool = False) -> _Run:
        """Prefill and single steps, with a run's choices, its streams, or every other lane of embeddings nudged."""
        model, prompt, count = self._forced.model, self._sizes.width_prompt, self._sizes.width_positions
        step = DecodeStep(model, batch=1, max_positions=self._length, whole_windows=True)
        pages = step.batch.token_pages_RP  # the same pages in every recipe: slots of entries are compared
        pages.copy_(torch.randperm(pages.numel(), generator=torch.Generator().manual_seed(6)).view_as(pages))
        self._forced.start(
            choices=None if choices is None else choices.kept, streams=None if streams is None else streams.kept
        )
        model.embed = self._nudged if nudged else self._embed  # type: ignore[method-assign]
        found = {"prefill": model.compute_logits(step.prefill(self._ids[:prompt])[-count:]).cpu()}
        singles = []
        for position in range(prompt, self._length):
            step.place([position + 1], [self._ids[position]])
            singles.append(step.logits().cpu())
        found["decode"] = torch.cat(singles)
        kept, behind, outputs = self._forced.kept, {}, {}
        for part, calls in kept.written.items():
            for kind, rows_ND in _by_kind(calls, count).items():
                behind[part, kind] = self._logits(rows_ND).cpu()
            outputs.update({(part, kind): rows.cpu() for kind, rows in _by_kind(kept.outputs[part], count).items()})
        kept.outputs, kept.written = {}, {}
        return _Run(logits=found, kept=kept, logits_behind=behind, outputs=outputs)

    def _logits(self, streams_TND: Tensor) -> Tensor:
        model = self._forced.model
        hidden_TD = model.ops.norm.rms_norm(model.collapse(streams_TND), model.norm_D, eps=model.config.rms_norm_eps)
        return model.compute_logits(hidden_TD)

    def _nudged(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings of which every other lane is the next bfloat16 away from zero."""
        embedded_TD = self._embed(token_ids_T).bfloat16()
        bits_TD = embedded_TD.view(torch.int16).clone()
        bits_TD[:, ::2] += 1
        return bits_TD.view(torch.bfloat16).to(self._forced.model.compute_dtype)


def _by_kind(calls: Sequence[Tensor], count: int) -> dict[str, Tensor]:
    return {"prefill": calls[0][-count:], "decode": torch.cat(list(calls[1:]))}


def width(rows: Rows, options: argparse.Namespace) -> None:
    """Logits of a prefill's last positions and of decode steps behind it, against the reference's.

    Each set of kernels runs three times: every part of a layer on the streams and choices of the reference; the layers
    in a row with the reference's choices; and in a row with choices of their own. Beside it stand two figures of the
    reference alone: what a nudge of the embedding does to it, and what its recipe costs against float32.
    """
    on_gpu = probe(process_settings()).is_gpu
    expected = _Expected()
    with rows.guard("width.reference"):
        _run_references(rows, ("*=reference",) if on_gpu else (), options, expected)
    for name in options.sets:
        with rows.guard("width", kernels=name):
            assert expected.served is not None, "there is no reference"
            _run_kernels(rows, name, options, expected, few=not on_gpu)
        _release()


@dataclass(eq=False)
class _Expected:
    """Runs of the reference: in the served recipe, and in float32 with choices of its own and with those of that."""

    served: _Run | None = None
    float32: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def _run_references(rows: Rows, kernels: tuple[str, ...], options: argparse.Namespace, expected: _Expected) -> None:
    subject = _Subject(kernels, "served", options)
    served = subject.run()
    for choices, fixed in (("reference", served), ("own", None)):
        nudged = subject.run(choices=fixed, nudged=True)
        params = {"kernels": "reference, nudged", "choices": choices}
        _compare(rows, params, "served", nudged.logits, served.logits)
        _report_choices(rows, params, nudged, served)
    del subject
    _release()
    subject = _Subject(kernels, "float32", options)
    for choices, fixed in (("reference", served), ("own", None)):
        exact = subject.run(choices=fixed)
        expected.float32[choices] = exact.logits
        params = {"kernels": "reference", "choices": choices}
        _compare(rows, params, "float32", served.logits, exact.logits)
        _report_choices(rows, params, exact, served)
    expected.served = served
    del subject
    _release()


def _run_kernels(rows: Rows, name: str, options: argparse.Namespace, expected: _Expected, *, few: bool) -> None:
    served = expected.served
    assert served is not None
    subject = _Subject(kernel_flags(name), "served", options, few=few)
    _compare_parts(rows, name, subject.run(choices=served, streams=served), served)
    for choices, fixed in (("reference", served), ("own", None)):
        found = subject.run(choices=fixed)
        params = {"kernels": name, "choices": choices}
        _compare(rows, params, "served", found.logits, served.logits)
        _compare(rows, params, "float32", found.logits, expected.float32[choices])
        _report_choices(rows, params, found, served)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compare(
    rows: Rows, params: dict[str, Any], against: str, found: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    for kind, logits in found.items():
        value = _nearness(logits, expected[kind])
        rows.add("width.cosine", value, "cosine", params={**params, "against": against, "positions": kind})


def _compare_parts(rows: Rows, name: str, found: _Run, expected: _Run) -> None:
    for (part, kind), logits in found.logits_behind.items():
        given, wanted = (run.outputs[part, kind].double() for run in (found, expected))
        value = _nearness(logits, expected.logits_behind[part, kind])
        value["error"] = round(float((given - wanted).norm() / wanted.norm()), 6)
        params = {"kernels": name, "layer": part.layer, "part": part.name, "positions": kind}
        rows.add("width.part", value, "cosine", params=params)


def _nearness(found: Tensor, expected: Tensor) -> dict[str, Any]:
    cosines = torch.nn.functional.cosine_similarity(found.double(), expected.double(), dim=-1)
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    return {
        "least": round(float(cosines.min()), 6),
        "mean": round(float(cosines.mean()), 6),
        "same_argmax": round(float(same), 4),
        "count": len(cosines),
        "finite": bool(found.isfinite().all()),
    }


def _report_choices(rows: Rows, params: dict[str, Any], found: _Run, expected: _Run) -> None:
    """How often the layers chose as the reference did, by themselves, from what they were given to read."""
    shares = {what: equal_choices(found.kept, expected.kept, what) for what in ("experts", "entries")}
    value = {what: None if share is None else round(share, 4) for what, share in shares.items()}
    rows.add("width.choices", value, "share", params=params)
