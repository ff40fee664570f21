"""Times the engine's host work: decode steps, prefill planning, prefix look-up. No model, no device.

The model of these runs returns at once, so what is timed is all that the host does for a step: deadlines, pages of all
pools, batch arrays and their upload, gathered page tables, reading tokens, finish checks, resume points.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from halocline.engine.engine import Engine
    from halocline.engine.prefix_cache import PrefixCache

__all__ = ["Row", "main", "measure"]

PAGE_TOKENS = 256
CONTEXT = 8192
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        name: As in the performance goals.
        what: What was timed.
        value: Median of the best round.
        worst: Median of the worst round.
        unit: Of both.
        must: Bound that has to hold.
        aim: Bound that is aimed at.
        at_least: Whether the bounds are lower ones.
    """

    name: str
    what: str
    value: float
    worst: float
    unit: str
    must: float
    aim: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the best round keeps the bound."""
        return self.value >= self.must if self.at_least else self.value <= self.must


class NullModel:
    """Costs nothing and gives every request token 7."""

    vocab_size = 129280
    max_positions = 1 << 20

    def __init__(self) -> None:
        import torch

        self._hidden = torch.zeros(1 << 14, 1)
        self._ids = torch.full((1024,), 7, dtype=torch.int32)

    def cache_plan(self, *, window_page_rows: int, page_tokens: int) -> Any:
        """The pages of V4-Flash."""
        from halocline.hal.formats import RowFormat, cache_layout
        from halocline.hal.ops.batch import CacheGeometry
        from halocline.models.interface import CachePlan

        def layout(rows: int) -> Any:
            return cache_layout("latent", RowFormat.FP8_BLOCK64, width=512, rope_width=64, page_rows=rows)

        return CachePlan(
            geometry=CacheGeometry(
                window=128,
                window_page_rows=window_page_rows,
                page_tokens=page_tokens,
                ratios=(4, 128),
                index_topk=512,
                max_positions=self.max_positions,
            ),
            window_layouts=(layout(window_page_rows),) * 43,
            token_layouts=(layout(page_tokens // 4),) * 21 + (layout(page_tokens // 128),) * 20,
            state_bytes_per_slot=12_200_000,
        )

    def allocate_cache(self, plan: Any, **sizes: int) -> Any:
        """Allocates nothing and says what it would have taken."""
        return SimpleNamespace(plan=plan, nbytes=plan.total_bytes(**sizes), copy_state=lambda sources, targets: None)

    def plan_step(self, batch: Any, geometry: Any, *, reuse: Any) -> Any:
        """No plan."""
        return reuse if reuse is not None else SimpleNamespace()

    def forward(self, batch: Any, plan: Any, cache: Any, *, layers: Any = None) -> Any:
        """No layers."""
        return SimpleNamespace(hidden_TD=self._hidden)

    def compute_logits(self, hidden_ND: Any) -> Any:
        """No head."""
        return hidden_ND

    def set_row(self, *_: Any, **__: Any) -> None:
        """The sampler keeps nothing."""

    def clear_row(self, row: int) -> None:
        """The sampler keeps nothing."""

    def sample(self, logits_RV: Any, rows: Sequence[int]) -> Any:
        """Token 7 for everyone."""
        return SimpleNamespace(ids_R=self._ids[: len(rows)], logprobs=None)


def make_engine(max_requests: int, *, max_step_tokens: int) -> Engine:
    """An engine with the pages of V4-Flash and room for everything."""
    from halocline.engine.config import EngineConfig
    from halocline.engine.engine import Engine

    model: Any = NullModel()
    config = EngineConfig(
        cache_bytes=1 << 50,
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
        page_tokens=PAGE_TOKENS,
        max_token_pages=1 << 15,
    )
    return Engine(model, model, config)


def add_request(engine: Engine, length: int, seed: int, *, max_tokens: int = 100_000) -> None:
    """Queues a prompt of random tokens."""
    from halocline.engine.admission import AdmittedRequest
    from halocline.engine.request import Request
    from halocline.engine.sampling_params import SamplingParams

    tokens = np.random.default_rng(seed).integers(8, NullModel.vocab_size, length)
    admitted = AdmittedRequest(
        prompt_ids=tuple(tokens.tolist()), params=SamplingParams(max_tokens=max_tokens, seed=seed), stop_ids=(1,)
    )
    engine.add(Request(f"request {seed}", admitted))


def time_calls(call: Callable[[], object], count: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def decode_engine(batch: int) -> Engine:
    """An engine in which so many requests decode, at different places of their pages."""
    engine = make_engine(batch, max_step_tokens=8192)
    for seed in range(batch):
        add_request(engine, CONTEXT - 37 * (seed % 64), seed)
    while len(engine.groups[0].scheduler._decoding) < batch:
        engine.step()
    for _ in range(64):
        engine.step()
    return engine


def decode_rows(rounds: int) -> list[Row]:
    """One decode step at batch 256, and how it grows from batch 32."""
    small, large = decode_engine(32), decode_engine(256)
    pairs = [(time_calls(small.step, 128), time_calls(large.step, 128)) for _ in range(rounds)]
    steps, ratios = [large * 1e6 for _, large in pairs], [large / small for small, large in pairs]
    what = f"decode step, batch 256, context {CONTEXT}"
    return [
        Row(name="cpu.sched", what=what, value=min(steps), worst=max(steps), unit="us", must=250, aim=80),
        Row(
            name="cpu.sched-growth",
            what="the same / batch 32",
            value=min(ratios),
            worst=max(ratios),
            unit="x",
            must=2.5,
            aim=2.0,
        ),
    ]


def prefill_rows(rounds: int) -> list[Row]:
    """The step that admits a prompt and plans its first 8,192 tokens beside 64 requests that decode."""
    engine = make_engine(128, max_step_tokens=8192 + 64)
    for seed in range(64):
        add_request(engine, CONTEXT - 37 * seed, seed)
    while len(engine.groups[0].scheduler._decoding) < 64:
        engine.step()
    medians = []
    for part in range(rounds):
        times = []
        for seed in range(8):
            add_request(engine, 20_000, 1000 + 8 * part + seed, max_tokens=1)
            before = engine.stats().prefill_tokens
            start = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - start) * 1e6)
            assert engine.stats().prefill_tokens - before == 8192, "the chunk is planned whole"
            while engine.stats().unfinished > 64:
                engine.step()
        medians.append(statistics.median(times))
    what = "step with an 8192-token chunk beside 64 running"
    return [
        Row(name="cpu.sched-prefill", what=what, value=min(medians), worst=max(medians), unit="us", must=400, aim=150)
    ]


def stored(prompts: Sequence[NDArray[np.int32]]) -> PrefixCache:
    """A prefix cache that holds every page of some prompts."""
    from halocline.engine.page_pool import PagePool
    from halocline.engine.prefix_cache import PrefixCache
    from halocline.engine.prefix_keys import PrefixKeys

    sizes = {
        "token page": sum(len(prompt) // PAGE_TOKENS for prompt in prompts),
        "window page": 1,
        "state slot": len(prompts),
    }
    tokens, window, slots = (PagePool(name, size) for name, size in sizes.items())
    cache = PrefixCache(tokens, window, slots, page_tokens=PAGE_TOKENS)
    for prompt in prompts:
        keys = PrefixKeys(PAGE_TOKENS)
        keys.extend(prompt)
        pages = tokens.allocate(len(keys.keys))
        end = cache.extend(None, keys.keys, pages)
        assert end is not None
        cache.make_resume_point(end, pages, (), slots.allocate(1)[0])
    return cache


def look_up(cache: PrefixCache, prompt: NDArray[np.int32]) -> int:
    """What admission does with a new prompt: hashes it and finds its cached tokens."""
    from halocline.engine.prefix_keys import PrefixKeys

    keys = PrefixKeys(PAGE_TOKENS)
    keys.extend(prompt)
    resume = cache.match(keys.keys, len(prompt)).resume
    return resume.depth * PAGE_TOKENS if resume is not None else 0


def prefix_rows(rounds: int) -> list[Row]:
    """Look-up of a long prompt against hashing it, and of short ones among few and many."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, NullModel.vocab_size, 1_000_000, dtype=np.int32)
    cache = stored([prompt[:900_096]])
    assert look_up(cache, prompt) == 900_096
    ratios = []
    for _ in range(rounds):
        raw = statistics.median(_hash_seconds(prompt) for _ in range(9))
        ratios.append(raw / time_calls(lambda: look_up(cache, prompt), 9))
    prompts = random.integers(0, NullModel.vocab_size, (10_000, 2048), dtype=np.int32)
    many, few = stored(list(prompts)), stored(list(prompts[:100]))
    order = [random.permutation(10_000)[:2000], random.integers(0, 100, 2000)]
    growth = []
    for _ in range(rounds):
        times = []
        for at, cache in zip(order, (many, few), strict=True):
            asked = [prompts[i].copy() for i in at]
            start = time.perf_counter()
            for one in asked:
                look_up(cache, one)
            times.append(time.perf_counter() - start)
        growth.append(times[0] / times[1])
    return [
        Row(
            name="cpu.prefix",
            what="match 1M tokens, 90% cached: share of raw hash speed",
            value=max(ratios),
            worst=min(ratios),
            unit="",
            must=0.2,
            aim=0.5,
            at_least=True,
        ),
        Row(
            name="cpu.prefix-scale",
            what="look-up among 10,000 prefixes / among 100",
            value=min(growth),
            worst=max(growth),
            unit="x",
            must=1.3,
            aim=1.1,
        ),
    ]


def _hash_seconds(prompt: NDArray[np.int32]) -> float:
    """Seconds of hashing a prompt's bytes once, in one piece, with the hash that keys are made of."""
    data = prompt.tobytes()
    start = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - start


def pool_rows(rounds: int) -> list[Row]:
    """Taking and giving back a page, 256 at a time."""
    from halocline.engine.page_pool import PagePool

    pools = [PagePool(name, 1 << 14) for name in ("window page", "token page", "state slot")]

    def call() -> None:
        for pool in pools:
            pool.release(pool.allocate(256))

    times = [time_calls(call, 200) / (3 * 256) * 1e6 for _ in range(rounds)]
    what = "allocate and free a page, 3 pools of 256"
    return [Row(name="cpu.alloc", what=what, value=min(times), worst=max(times), unit="us", must=1.0, aim=0.2)]


def measure(rounds: int = ROUNDS) -> list[Row]:
    """Every figure."""
    rows: list[Row] = []
    for part in (decode_rows, prefill_rows, prefix_rows, pool_rows):
        gc.collect()
        rows += part(rounds)
    return rows


def main(arguments: Sequence[str]) -> int:
    """Prints the table and, with --json, writes the same as JSON; the status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="./dev bench host", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results here ('-': print them instead of the table)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    rows = measure(options.rounds)
    result = {"benchmark": "host", **_environment(), "rows": [{**asdict(row), "holds": row.holds} for row in rows]}
    if options.json == "-":
        print(json.dumps(result, indent=1))
    else:
        print(f"{'name':18}{'best':>9}{'worst':>9}  {'':3}{'must':>7}{'aim':>7}   what")
        for row in rows:
            bound = f"{'>=' if row.at_least else '<='} {row.must:g}"
            mark = "" if row.holds else "   MISSED"
            print(
                f"{row.name:18}{row.value:9.2f}{row.worst:9.2f}  {row.unit:3}{bound:>7}{row.aim:>7g}   {row.what}{mark}"
            )
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
    return 0 if all(row.holds for row in rows) else 1


def _environment() -> dict[str, str]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": platform.processor() or platform.machine(),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
