"""What the ranks of the model's tests do. Each function runs in every process of a world.

R requests, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.ops.batch import BatchMetadata
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.parallel import SINGLE, Parallel, ParallelSizes, make_parallel
from halocline.models.sharding import RankPart
from halocline.models.weight_source import MappingSource, WeightSource

ROOT = Path(__file__).resolve().parents[2]
# Divides by four in every direction: 8 heads, 4 groups, 200 vocabulary rows, width 32 stored plainly.
FOURS = TINY.replace(o_groups=4, vocab_size=200).unquantized("float32")
# The same in the formats of a release: every part of four is whole blocks of 128.
BLOCKS = TINY.replace(o_groups=4, o_lora_rank=128, moe_intermediate_size=512, hidden_size=128)

Call = tuple[str, tuple[int, ...], str, int]


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Token ids of every request, and how many of them each step brings.

    Attributes:
        ids: One row of ids for each request; one more than its steps bring, for the draft layer.
        steps: New tokens of each request, step by step; steps of at most one token each decode.
    """

    ids: list[list[int]]
    steps: list[list[int]]


@dataclass(kw_only=True)
class Answer:
    """What one rank saw.

    Attributes:
        logits: By request, a row for each of its tokens.
        drafts: The same of the draft layer.
        calls: Every collective in order: op, shape, element type, size of the group.
    """

    logits: dict[int, Any] = field(default_factory=dict)
    drafts: dict[int, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


def logged_ops(calls: list[Call]) -> Ops:
    """The reference kernels, with a note of each collective that is entered."""
    kernels = reference_kernels()

    def noting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def noted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            group = args[-1]
            if group.size > 1:
                calls.append((name, tuple(x.shape), str(x.dtype), group.size))
            return kernel(x, *args, **kwargs)

        return noted

    return Ops({n: noting(n, k) if n.startswith("collective.") else k for n, k in kernels.items()})


def build(parallel: Parallel, ops: Ops, folder: str | None) -> DeepseekV4Model:
    """The model of a folder, or the tiny one with random weights."""

    def network(config: DeepseekV4Config, source: WeightSource) -> DeepseekV4Model:
        return DeepseekV4Model(
            config, recipe("float32"), lambda layer: ops, source, max_positions=512, parallel=parallel
        )

    if folder is None:
        part = RankPart(plan=plan_weights(FOURS), parallel=parallel)
        return network(FOURS, MappingSource(tensors=dict(RandomWeights(FOURS, seed=7)), part=part))
    checkpoint = Checkpoint.open(folder)
    with CheckpointSource(checkpoint, parallel=parallel) as source:
        model = network(checkpoint.config, source)
        source.finish()
    return model


def answer(
    rank: int,
    sizes: ParallelSizes,
    feed: Feed,
    a2a: Literal["none", "all_to_all"] = "none",
    folder: str | None = None,
) -> Answer:
    """Feeds the requests of this rank's data-parallel group, in step with the other groups."""
    parallel = SINGLE if sizes.world == 1 else make_parallel(sizes, rank, "cpu", a2a=a2a)
    found = Answer()
    model = build(parallel, logged_ops(found.calls), folder)
    groups = [list(range(group, len(feed.ids), sizes.dp)) for group in range(sizes.dp)]
    run_steps(model, feed, groups, parallel.dp_index, found)
    return found


def run_steps(model: DeepseekV4Model, feed: Feed, groups: list[list[int]], group: int, found: Answer) -> None:
    """All steps of one group; each is padded to the tokens of the fullest group."""
    mine = groups[group]
    sequences = make_sequences(len(mine))
    plan = model.cache_plan(window_page_rows=16, page_tokens=128)
    cache = model.allocate_cache(
        plan,
        num_window_pages=sequences.num_window_pages,
        num_token_pages=sequences.num_token_pages,
        num_state_slots=len(mine),
    )
    rows: dict[int, list[Any]] = {request: [] for request in mine}
    drafts: dict[int, list[Any]] = {request: [] for request in mine}
    done = dict.fromkeys(mine, 0)
    for step in feed.steps:
        new, following = (
            [torch.tensor(feed.ids[r][done[r] + ahead : done[r] + ahead + step[r]], dtype=torch.int32) for r in mine]
            for ahead in (0, 1)
        )
        longest = max(sum(step[r] for r in requests) for requests in groups)
        decodes = all(count <= 1 for count in step)
        batch = padded(sequences.feed(new, num_decode=len(mine) if decodes else 0), longest)
        attention_plan = model.plan_step(batch, plan.geometry, reuse=None)
        with torch.no_grad():
            output = model.forward(batch, attention_plan, cache)
            logits = model.compute_logits(output.hidden_TD)
            next_ids = torch.cat((*following, torch.ones(longest - batch.num_tokens, dtype=torch.int32)))
            guesses = model.draft_logits(output.streams_TND, next_ids, attention_plan, cache)
        start = 0
        for request in mine:
            stop = start + step[request]
            rows[request].append(logits[start:stop].numpy())
            drafts[request].append(guesses[start:stop].numpy())
            done[request], start = done[request] + step[request], stop
    found.logits = {request: np.concatenate(parts) for request, parts in rows.items()}
    found.drafts = {request: np.concatenate(parts) for request, parts in drafts.items()}


def make_sequences(num_requests: int) -> Any:
    """The helper of the model tests."""
    spec = importlib.util.spec_from_file_location("models_conftest", ROOT / "tests" / "models" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module.Sequences(window_page_rows=16, page_tokens=128, capacity=256, num_requests=num_requests)


def padded(batch: BatchMetadata, num_rows: int) -> BatchMetadata:
    """Rows of padding up to a number of tokens: no position, no request, an id that must not matter."""
    missing = num_rows - batch.num_tokens

    def more(tensor: Tensor, filler: int) -> Tensor:
        return torch.cat((tensor, tensor.new_full((missing, *tensor.shape[1:]), filler)))

    return replace(
        batch,
        token_ids_T=more(batch.token_ids_T, 1),
        positions_T=more(batch.positions_T, -1),
        token_requests_T=more(batch.token_requests_T, -1),
    )
