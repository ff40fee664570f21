"""Kernels that are wrong in one known way, put in the place of the bound ones, and a model that runs on them.

Each ablation leaves a fluent model: what it breaks must show in the marks, or the marks would not measure it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from halocline.engine import loading
from halocline.engine.llm import LLM
from halocline.hal.ops import Ops
from halocline.hal.ops.moe import Routing

Kernel = Callable[..., Any]
Plant = Callable[[Mapping[str, Kernel]], Mapping[str, Kernel]]
"""Takes the bound kernels by op and gives the replacements."""


def shuffled_selection(bound: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
    """The indexer picks as many entries as it should, at random among the visible ones."""
    gen = torch.Generator().manual_seed(1)

    def select(plan: Any, logits_TS: Tensor, **options: Any) -> Any:
        return bound["indexer.select"](plan, torch.rand(logits_TS.shape, generator=gen), **options)

    return {"indexer.select": select}


def empty_compressed_caches(bound: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
    """Compressed rows and index keys stay the zeros with which they were allocated."""

    def insert(*arguments: Any, **options: Any) -> None:
        return None

    return {"compressor.insert": insert}


def no_sink(bound: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
    """Attention weights sum to one: nothing goes to the sink."""

    def without(name: str) -> Kernel:
        def attend(*arguments: Any, **options: Any) -> Any:
            *others, sink_H = arguments
            return bound[name](*others, torch.full_like(sink_H, -torch.inf), **options)

        return attend

    return {name: without(name) for name in ("attention.sparse_prefill", "attention.sparse_decode")}


def sigmoid_routing(bound: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
    """Experts are chosen and weighed by the sigmoid of their logits, as the generation before this model did."""

    def weigh(logits_TE: Tensor, ids_TK: Tensor, scale: float) -> Routing:
        chosen_TK = torch.sigmoid(logits_TE.float()).gather(1, ids_TK.long())
        return Routing(ids_TK.int(), chosen_TK / chosen_TK.sum(-1, keepdim=True) * scale)

    def by_score(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
        return weigh(logits_TE, (torch.sigmoid(logits_TE.float()) + bias_E).topk(num_chosen).indices, scale)

    def by_hash(logits_TE: Tensor, token_ids_T: Tensor, table_VK: Tensor, *, scale: float) -> Routing:
        return weigh(logits_TE, table_VK[token_ids_T.long()], scale)

    return {"moe.route_by_score": by_score, "moe.route_by_hash": by_hash}


@contextmanager
def planted_model(folder: Path, plant: Plant | None = None, **options: Any) -> Iterator[LLM]:
    """The model of a folder on the bound kernels, some of them replaced in every layer that has them."""
    load_ops = loading.load_ops
    replaced: set[str] = set()

    def with_planted(*arguments: Any) -> Ops:
        bound = dict(load_ops(*arguments).kernels)
        wrong = {name: kernel for name, kernel in (plant(bound) if plant else {}).items() if name in bound}
        replaced.update(wrong)
        return Ops({**bound, **wrong})

    with mock.patch.object(loading, "load_ops", with_planted), LLM(folder, **options) as llm:
        assert plant is None or replaced == plant({}).keys(), "an ablation replaces kernels that are bound"
        yield llm


def with_rope_of_plain_layers(folder: Path, copy: Path) -> Path:
    """A copy of a checkpoint whose compressed layers rotate as the others do: their base, and no stretching."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("suites"))
    config = json.loads((copy / "config.json").read_text())
    config["compress_rope_theta"] = config["rope_theta"]
    config["rope_scaling"]["factor"] = 1
    (copy / "config.json").write_text(json.dumps(config))
    return copy
