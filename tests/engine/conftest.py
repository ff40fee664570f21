"""A fake model that computes nothing but tags: what it generates proves which rows it read.

Its next token is a function of the fingerprint of all tokens so far, and that fingerprint reaches it only through the
window rows, page tables and state slots of the engine. `oracle` computes the same from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from halocline.engine.admission import admit
from halocline.engine.config import EngineConfig
from halocline.engine.debug_tags import CacheTags
from halocline.engine.engine import Engine
from halocline.engine.memory_plan import MemoryPlan, plan_memory
from halocline.engine.request import Request
from halocline.engine.sampling_params import SamplingParams
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.ops.batch import CacheGeometry
from halocline.models.interface import CachePlan, StepOutput

VOCAB = 97
STATE_BYTES = 4096


def next_token(fingerprint: int) -> int:
    return (fingerprint >> 11) % VOCAB


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that the fake model generates, without any cache."""
    state = 0
    for token in prompt:
        state = (state * 0x9E3779B97F4A7C15 + (token + 1) * 0xD1342543DE82EF95) % 2**64
    output: list[int] = []
    for _ in range(count):
        token = next_token(state)
        output.append(token)
        state = (state * 0x9E3779B97F4A7C15 + (token + 1) * 0xD1342543DE82EF95) % 2**64
    return output


class FakeCache:
    def __init__(self, plan: CachePlan, sizes: dict[str, int]) -> None:
        self.plan = plan
        self.nbytes = plan.total_bytes(**sizes)
        self.tags = CacheTags(plan.geometry, **sizes)
        self.copies: list[tuple[int, int]] = []

    def copy_state(self, sources: list[int], targets: list[int]) -> None:
        self.copies += zip(sources, targets, strict=True)
        self.tags.copy_state(sources, targets)


@dataclass(eq=False, kw_only=True)
class FakeModel:
    """Tokens in `nan_tokens`, when fed, turn the logits of that position into NaN; `broken` makes a step raise."""

    window: int = 24
    ratios: tuple[int, ...] = (4, 16)
    max_positions: int = 1024
    vocab_size: int = VOCAB
    nan_tokens: frozenset[int] = frozenset()
    broken: bool = False
    batches: list[tuple[int, int]] = field(default_factory=list)

    def cache_plan(self, *, window_page_rows: int, page_tokens: int) -> CachePlan:
        layout = cache_layout("latent", RowFormat.FLOAT32, width=128, rope_width=64, page_rows=window_page_rows)
        return CachePlan(
            geometry=CacheGeometry(
                window=self.window,
                window_page_rows=window_page_rows,
                page_tokens=page_tokens,
                ratios=self.ratios,
                index_topk=8,
                max_positions=self.max_positions,
            ),
            window_layouts=(layout,) * 3,
            token_layouts=tuple(replace(layout, page_rows=page_tokens // ratio) for ratio in self.ratios),
            state_bytes_per_slot=STATE_BYTES,
        )

    def allocate_cache(self, plan: CachePlan, **sizes: int) -> FakeCache:
        return FakeCache(plan, sizes)

    def plan_step(self, batch: Any, geometry: CacheGeometry, *, reuse: Any) -> Any:
        return reuse if reuse is not None else SimpleNamespace()

    def forward(self, batch: Any, plan: Any, cache: FakeCache, *, layers: None = None) -> StepOutput:
        if self.broken:
            raise RuntimeError("the device fell over")
        self.batches.append((batch.num_decode_tokens, batch.num_tokens))
        prints = cache.tags.step(batch).view(np.int64).copy()
        hidden = torch.from_numpy(prints)[:, None]
        nan = torch.isin(batch.token_ids_T, torch.tensor(sorted(self.nan_tokens), dtype=torch.int32))
        hidden = torch.stack((hidden[:, 0], nan.long()), dim=1)
        return StepOutput(hidden_TD=hidden, streams_TND=hidden[:, None])

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        prints = hidden_ND[:, 0].numpy().astype(np.uint64)
        chosen = torch.from_numpy(((prints >> np.uint64(11)) % np.uint64(self.vocab_size)).astype(np.int64))
        logits = torch.zeros(len(chosen), self.vocab_size)
        logits.scatter_(1, chosen[:, None], 1.0)
        return logits.masked_fill(hidden_ND[:, 1:].bool(), torch.nan)


class GreedySampler:
    """The largest logit, -1 for NaN. It insists that rows are taken and left in turn."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}

    def set_row(self, row: int, params: SamplingParams, prompt_ids: Any, output_ids: Any, **_: Any) -> None:
        assert row not in self.rows, f"row {row} is taken"
        self.rows[row] = (params, tuple(output_ids))

    def clear_row(self, row: int) -> None:
        del self.rows[row]

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[int]) -> Any:
        assert len(set(rows)) == len(rows) == len(logits_RV)
        ids = logits_RV.nan_to_num(nan=0.0).argmax(dim=1).int()
        return SimpleNamespace(ids_R=ids.masked_fill(logits_RV.isnan().any(dim=1), -1), logprobs=None)


@dataclass(eq=False, kw_only=True)
class Bench:
    """An engine over a fake model, with short ways to use it."""

    model: FakeModel
    engine: Engine
    count: int = 0

    def admit(self, prompt: Sequence[int], **params: Any) -> Any:
        return admit(prompt, SamplingParams(**{"temperature": 0.0, **params}), self.engine.limits)

    def add(self, prompt: Sequence[int], *, leader: Request | None = None, **options: Any) -> Request:
        """Queues a request; options that a `Request` does not know are sampling parameters."""
        own = {
            name: options.pop(name) for name in ("priority", "deadline", "extra_keys", "on_update") if name in options
        }
        self.count += 1
        request = Request(f"r{self.count}", self.admit(prompt, **options), arrival_time=self.engine.clock(), **own)
        self.engine.add(request, leader=leader)
        return request

    def generate(self, prompt: Sequence[int], **options: Any) -> list[int]:
        request = self.add(prompt, **options)
        self.engine.run()
        assert request.error is None, request.error
        return request.output_ids

    def check(self) -> None:
        """Every page and slot is counted once; when nothing runs, none is held by a request."""
        self.engine.check_idle()

    def all_free(self) -> bool:
        pools = (
            self.engine.groups[0].cache.window_pool,
            self.engine.groups[0].cache.token_pool,
            self.engine.groups[0].cache.slot_pool,
        )
        return all(pool.num_free == pool.size for pool in pools)


@pytest.fixture
def make_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """Makes an engine; fields of `FakeModel` and of `EngineConfig` are given by name, sizes of pools as `pools`."""

    def make(
        *,
        capture: Any = None,
        clock: Callable[[], float] | None = None,
        sampler: Any = None,
        pools: dict[str, int] | None = None,
        **options: Any,
    ) -> Bench:
        def plan(*args: Any, **sizes: Any) -> MemoryPlan:
            return replace(plan_memory(*args, **sizes), **(pools or {}))

        monkeypatch.setattr("halocline.engine.engine.plan_memory", plan)
        names = FakeModel.__dataclass_fields__
        model = FakeModel(**{name: options.pop(name) for name in list(options) if name in names})
        defaults = {
            "cache_bytes": 2**40,
            "max_requests": 4,
            "max_step_tokens": 64,
            "window_page_rows": 8,
            "page_tokens": 32,
            "max_token_pages": 64,
        }
        config = EngineConfig(**{**defaults, **options})
        engine = Engine(
            model,
            sampler or GreedySampler(),
            config,
            capture=capture,
            **({"clock": clock} if clock is not None else {}),
        )
        return Bench(model=model, engine=engine)

    return make


@pytest.fixture
def prompt_of() -> Callable[[int], list[int]]:
    """Token ids of a given length, different for each seed."""

    def make(length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()

    return make


@pytest.fixture(name="oracle")
def oracle_fixture() -> Callable[[Sequence[int], int], list[int]]:
    return oracle
