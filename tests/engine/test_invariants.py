"""Standing invariants on the tiny model, float32 recipe: however tokens are fed, a request gives the same logits.

Every logit that the engine samples from is compared with one prefill of the same tokens that uses no engine: plain
batches by hand, contiguous pages, no prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halocline.backends_reference.kernels import reference_kernels
from halocline.engine.admission import admit
from halocline.engine.config import EngineConfig
from halocline.engine.engine import Engine
from halocline.engine.graphs import RerunCapture
from halocline.engine.request import Request
from halocline.engine.sampling_params import SamplingParams
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.ops.batch import BatchMetadata
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.weight_source import MappingSource

ATOL = 2e-5
LENGTHS = (1, 3, 4, 127, 128, 129, 300)
CHUNKS = (1, 2, 4, 7, 31, 64, 127, 128, 129, 200, 256)
OUTPUT = 6


@dataclass(eq=False)
class Recorder:
    """Greedy, and keeps every row of logits by request."""

    engine: Engine | None = None
    logits: dict[Request, list[torch.Tensor]] = field(default_factory=dict)

    def set_row(self, row: int, params: Any, prompt_ids: Any, output_ids: Any, **_: Any) -> None:
        pass

    def clear_row(self, row: int) -> None:
        pass

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[int]) -> Any:
        assert self.engine is not None
        for row, logits in zip(rows, logits_RV, strict=True):
            request = self.engine.groups[0].cache.table.requests[row]
            assert request is not None
            kept = self.logits.setdefault(request, [])
            kept.append(logits.clone())
        return SimpleNamespace(ids_R=logits_RV.argmax(dim=1).int(), logprobs=None)


@pytest.fixture(scope="module")
def model() -> DeepseekV4Model:
    config = TINY.unquantized("float32")
    ops = Ops(reference_kernels())
    weights = MappingSource(tensors=dict(RandomWeights(config, seed=5)))
    return DeepseekV4Model(config, recipe("float32"), lambda layer: ops, weights, max_positions=512, with_draft=False)


@pytest.fixture(scope="module")
def one_prefill(model: DeepseekV4Model) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Logits of all positions, from one forward pass over contiguous pages."""

    @cache
    def compute(tokens: tuple[int, ...]) -> torch.Tensor:
        count = len(tokens)
        plan = model.cache_plan(window_page_rows=128, page_tokens=512)
        caches = model.allocate_cache(plan, num_window_pages=4, num_token_pages=1, num_state_slots=1)
        positions = torch.arange(count, dtype=torch.int32)
        batch = BatchMetadata(
            token_ids_T=torch.tensor(tokens, dtype=torch.int32),
            positions_T=positions,
            token_requests_T=torch.zeros(count, dtype=torch.int32),
            query_starts_R1=torch.tensor([0, count], dtype=torch.int32),
            seqlens_R=torch.tensor([count], dtype=torch.int32),
            state_slots_R=torch.zeros(1, dtype=torch.int32),
            window_pages_RP=torch.arange(4, dtype=torch.int32)[None],
            token_pages_RP=torch.zeros(1, 1, dtype=torch.int32),
            num_tokens=count,
            num_requests=1,
            num_decode_tokens=0,
            num_decode_requests=0,
            max_seqlen=count,
        )
        step = model.plan_step(batch, plan.geometry, reuse=None)
        return model.compute_logits(model.forward(batch, step, caches).hidden_TD)

    return compute


@dataclass(eq=False)
class Runs:
    """Builds engines over one model and compares what they sample from with one prefill."""

    model: DeepseekV4Model
    one_prefill: Callable[[tuple[int, ...]], torch.Tensor]

    def engine(self, **options: Any) -> Engine:
        recorder = Recorder()
        defaults = {
            "cache_bytes": 2**30,
            "max_requests": 8,
            "max_step_tokens": 512,
            "window_page_rows": 8,
            "page_tokens": 128,
            "max_token_pages": 24,
        }
        capture = RerunCapture() if options.get("graph_sizes") else None
        config = EngineConfig(**{**defaults, **options})
        engine = Engine(self.model, recorder, config, capture=capture)  # type: ignore[arg-type]
        recorder.engine = engine
        return engine

    def add(self, engine: Engine, prompt: Sequence[int], max_tokens: int = OUTPUT, **options: Any) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(f"of {len(prompt)}", admit(prompt, params, engine.limits), **options)
        engine.add(request)
        return request

    def check(self, engine: Engine, requests: Sequence[Request]) -> None:
        """The logits behind every token equal those of one prefill; so do the tokens."""
        for request in requests:
            assert request.finish_reason == "length", request.error
            tokens = [*request.admitted.prompt_ids, *request.output_ids]
            expected = self.one_prefill(tuple(tokens[:-1]))[len(request.prompt) - 1 :]
            found = torch.stack(engine.sampler.logits[request])  # type: ignore[attr-defined]
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=ATOL, rtol=0.0)
            assert request.output_ids == expected.argmax(dim=1).tolist()
        engine.check_idle()


@pytest.fixture(scope="module")
def runs(model: DeepseekV4Model, one_prefill: Callable[[tuple[int, ...]], torch.Tensor]) -> Runs:
    return Runs(model, one_prefill)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, TINY.vocab_size, (length,), generator=generator).tolist()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_chunking_gives_the_logits_of_one_prefill(runs: Runs, chunk: int) -> None:
    engine = runs.engine(max_chunk_tokens=chunk, prefix_caching=False)
    for length in LENGTHS:
        if chunk == 1 and length > 129:
            continue
        request = runs.add(engine, prompt(length))
        engine.run()
        runs.check(engine, [request])


def test_alone_equals_in_a_batch_and_in_any_slot(runs: Runs) -> None:
    """Requests of all lengths share steps; they come and go in another order than they lie in rows."""
    engine = runs.engine(max_step_tokens=160, prefix_caching=False)
    requests = [runs.add(engine, prompt(length), max_tokens=3 + length % 5) for length in LENGTHS]
    for _ in range(4):
        engine.step()
    engine.abort(requests[2])
    requests[2:3] = [runs.add(engine, prompt(length, 1)) for length in (30, 126, 5)]
    engine.run()
    runs.check(engine, requests)
    assert len({request.row for request in requests}) == 1, "all rows are left"


def test_requests_in_the_middle_of_a_block_keep_their_state(runs: Runs) -> None:
    """Three requests at positions 2, 3 and 1 of a block; one is dropped, one is admitted, the order changes."""
    engine = runs.engine(prefix_caching=False)
    first, dropped, third = (runs.add(engine, prompt(length), max_tokens=12) for length in (130, 131, 129))
    for _ in range(3):
        engine.step()
    engine.abort(dropped)
    fourth = runs.add(engine, prompt(126), max_tokens=12)
    engine.run()
    runs.check(engine, [first, third, fourth])


def test_the_same_prompt_three_times_without_reuse(runs: Runs) -> None:
    engine = runs.engine(prefix_caching=False, max_requests=1)
    requests = [runs.add(engine, prompt(133)) for _ in range(3)]
    engine.run()
    runs.check(engine, requests)
    assert requests[0].output_ids == requests[1].output_ids == requests[2].output_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_cold_equals_hit_equals_after_eviction(runs: Runs, overlap: bool) -> None:
    engine = runs.engine(num_snapshots=2, max_requests=2, max_token_pages=8, overlap=overlap)
    text = prompt(300)
    cold = runs.add(engine, text)
    engine.run()
    hit = runs.add(engine, text)
    shared = runs.add(engine, [*text[:280], *prompt(40, 2)])
    engine.run()
    assert (cold.num_cached_tokens, hit.num_cached_tokens, shared.num_cached_tokens) == (0, 256, 256)
    others = [runs.add(engine, prompt(length, 3)) for length in (290, 291, 292, 293)]
    engine.run()
    evicted = runs.add(engine, text)
    engine.run()
    assert evicted.num_cached_tokens == 0
    assert engine.stats().evictions > 0
    runs.check(engine, [cold, hit, shared, *others, evicted])


def test_sixteen_consecutive_lengths_show_no_pattern(runs: Runs) -> None:
    """No error with a period of 4 or 128: every length is within the same bound, also decoding over a boundary."""
    engine = runs.engine(max_requests=8)
    requests = [runs.add(engine, prompt(length)) for length in range(118, 134)]
    engine.run()
    runs.check(engine, requests)


def test_a_turn_that_goes_on_from_an_answer_hits_its_rows(runs: Runs) -> None:
    """The second prompt is the first with its answer: decoded rows and their snapshot are reused."""
    engine = runs.engine()
    first = runs.add(engine, prompt(250), max_tokens=20)
    engine.run()
    second = runs.add(engine, [*first.admitted.prompt_ids, *first.output_ids, *prompt(9, 4)])
    engine.run()
    assert second.num_cached_tokens == 256
    runs.check(engine, [first, second])


def test_a_branch_of_a_known_prompt_becomes_a_resume_point(runs: Runs) -> None:
    """Two prompts with a common beginning: the second finds no point to resume there, the third does."""
    engine = runs.engine()
    common = prompt(200)
    requests = []
    for seed in (1, 2, 3):
        requests.append(runs.add(engine, [*common, *prompt(100, seed)]))
        engine.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 128]
    runs.check(engine, requests)


def test_after_preemption_equals_without(runs: Runs) -> None:
    """Four requests whose pages cannot all fit as they grow."""
    engine = runs.engine(max_requests=4, max_token_pages=5, max_positions=512)
    requests = [runs.add(engine, prompt(length), max_tokens=40) for length in (120, 121, 122, 123)]
    engine.run()
    assert engine.stats().preemptions > 0
    runs.check(engine, requests)


def test_outputs_of_one_prompt_share_its_prefix(runs: Runs) -> None:
    engine = runs.engine()
    text = prompt(270)
    leader = runs.add(engine, text)
    followers = []
    for index in (1, 2):
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
        followers.append(Request("of 270", admit(text, params, engine.limits), index=index))
        engine.add(followers[-1], leader=leader)
    engine.run()
    assert [request.num_cached_tokens for request in (leader, *followers)] == [0, 256, 256]
    runs.check(engine, [leader, *followers])


def test_replay_equals_eager(runs: Runs) -> None:
    """Padded replays on persistent buffers, alone and beside others, in both orders of length."""
    lengths = (1, 31, 127, 300, 128, 129)
    eager = runs.engine()
    graphs = runs.engine(graph_sizes=(2, 4, 8))
    for engine in (eager, graphs):
        requests = [runs.add(engine, prompt(length), max_tokens=4 + index) for index, length in enumerate(lengths)]
        engine.run()
        runs.check(engine, requests)
        requests = [runs.add(engine, prompt(length), max_tokens=4) for length in reversed(lengths)]
        engine.run()
        runs.check(engine, requests)
    copies = [runs.add(graphs, prompt(66)) for _ in range(8)]
    graphs.run()
    runs.check(graphs, copies)


def test_tags_agree_on_the_real_model(runs: Runs) -> None:
    """The debug mode finds nothing wrong where logits are right."""
    engine = runs.engine(debug_tags=True, max_requests=3, max_token_pages=6, num_snapshots=3)
    requests = [runs.add(engine, prompt(length, length % 2), max_tokens=9) for length in (129, 250, 129, 3, 250, 126)]
    engine.run()
    runs.check(engine, requests)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 280), min_size=1, max_size=5),
    chunk=st.integers(5, 256),
    pages=st.sampled_from((4, 6, 24)),
    caching=st.booleans(),
    overlap=st.booleans(),
    window_page_rows=st.sampled_from((2, 8, 64)),
)
def test_any_mixture_gives_the_logits_of_one_prefill(
    runs: Runs, lengths: list[int], chunk: int, pages: int, caching: bool, overlap: bool, window_page_rows: int
) -> None:
    engine = runs.engine(
        max_chunk_tokens=chunk,
        max_token_pages=pages,
        prefix_caching=caching,
        overlap=overlap,
        window_page_rows=window_page_rows,
        max_requests=3,
    )
    common = prompt(280, 9)
    requests = [runs.add(engine, [*common[: length // 2], *prompt(length - length // 2, 8)]) for length in lengths]
    engine.run()
    runs.check(engine, requests)
