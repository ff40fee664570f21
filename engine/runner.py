"""ModelRunner: runs steps on the model. Plans outside of graphs, eager or replayed, tokens read one step late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from halocline.engine.batch_builder import BatchBuilder
from halocline.engine.graphs import DecodeGraphs, GraphCapture

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.engine.batch import Batch, Chunk
    from halocline.engine.batch_builder import StepBuffers
    from halocline.engine.config import EngineConfig
    from halocline.engine.logprob_values import TokenLogprob
    from halocline.engine.memory_plan import MemoryPlan
    from halocline.engine.request import Request
    from halocline.engine.row_table import RowTable
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.batch import BatchMetadata
    from halocline.models.interface import CausalModel, ModelCache

__all__ = ["Flight", "ModelRunner", "PromptScore", "Sampling"]

_SCORED_ROWS = 1024


class Logprobs(Protocol):
    """Log-probabilities on the device."""

    def to_host(self) -> dict[int, TokenLogprob]:
        """Waits for them; by position in the step."""
        ...


class Drawn(Protocol):
    """What a step drew."""

    @property
    def ids_R(self) -> Tensor:
        """int32 tokens; -1 where a row has failed."""
        ...

    @property
    def logprobs(self) -> Logprobs | None:
        """Of the rows that asked."""
        ...


class Sampling(Protocol):
    """The part of the sampler that a step calls."""

    def sample(self, logits_RV: Tensor, rows: Sequence[int]) -> Drawn:
        """Draws one token for each row."""
        ...

    def score(self, logits_TV: Tensor, targets_T: Tensor, num_top: int) -> Logprobs:
        """Log-probabilities of given tokens."""
        ...


class PromptScore(NamedTuple):
    """Log-probabilities of prompt tokens; the first is that of the token behind position `start`."""

    request: Request
    start: int
    logprobs: Logprobs


@dataclass(eq=False, kw_only=True)
class Flight:
    """A step that has been launched and not been read.

    Attributes:
        batch: The step.
        ids: Its tokens, on the host once `wait` has returned.
        wait: Waits for the device to reach the end of the step.
        logprobs: Of the sampled tokens, if any request asked.
        prompt_scores: Log-probabilities of prompt tokens, in order.
    """

    batch: Batch
    ids: Tensor
    wait: Callable[[], None]
    logprobs: Logprobs | None = None
    prompt_scores: list[PromptScore] = field(default_factory=list)


class ModelRunner:
    """The model, its caches and the buffers of its steps."""

    def __init__(
        self,
        model: CausalModel,
        memory: MemoryPlan,
        table: RowTable,
        sampler: Sampling,
        config: EngineConfig,
        *,
        device: torch.device,
        capture: GraphCapture | None = None,
    ) -> None:
        """Allocates the caches and all buffers; `warm_up` makes it ready.

        Args:
            model: The network.
            memory: Sizes; compared with what is allocated.
            table: Engine rows.
            sampler: Draws tokens.
            config: Resolved.
            device: Where the model runs.
            capture: The backend's graphs, needed when `config.graph_sizes` has sizes.
        """
        self.model = model
        self.cache: ModelCache = model.allocate_cache(
            memory.cache_plan,
            num_window_pages=memory.num_window_pages,
            num_token_pages=memory.num_token_pages,
            num_state_slots=memory.num_state_slots,
        )
        memory.check_allocation(self.cache)
        self.geometry = memory.cache_plan.geometry
        self.builder = BatchBuilder(
            table, max_step_tokens=config.max_step_tokens, max_positions=memory.max_positions, device=device
        )
        self.sampler = sampler
        self.graphs = DecodeGraphs(config.graph_sizes if capture is not None else ())
        self._capture = capture
        self._device = device
        self._plans: dict[StepBuffers, AttentionPlan] = {}
        self._logits_RV = torch.zeros(0, 0)
        pin = device.type != "cpu"
        self._host_ids = [torch.zeros(table.num_rows, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._turn = 0

    def warm_up(self) -> float:
        """Makes the plans at capacity, runs each kind of step once on padding and records the graphs.

        Returns:
            Seconds that it took.
        """
        start = time.perf_counter()
        for buffers in (self.builder.mixed, self.builder.decode):
            everything = self.builder.padding(buffers, buffers.max_tokens, buffers.max_requests)
            self._plans[buffers] = self.model.plan_step(everything, self.geometry, reuse=None)
            small = self.builder.padding(buffers, 1, 1)
            self._run(small, self._refresh_plan(small, buffers))
        if self._capture is not None and self.graphs.sizes:
            sizes = (self.graphs.sizes[-1], self.model.vocab_size)
            self._logits_RV = torch.zeros(sizes, dtype=torch.float32, device=self._device)
            self.graphs.record(self._capture, self._padded_step)
        return time.perf_counter() - start

    def _padded_step(self, size: int) -> Callable[[], None]:
        """The function that a graph of this size records."""
        buffers = self.builder.decode
        batch = self.builder.padding(buffers, size, size)
        plan = self._refresh_plan(batch, buffers)

        def run() -> None:
            self._logits_RV[:size].copy_(self._run(batch, plan))

        return run

    def _run(self, batch: BatchMetadata, plan: AttentionPlan) -> Tensor:
        """Logits of all tokens of a step."""
        return self.model.compute_logits(self.model.forward(batch, plan, self.cache).hidden_TD)

    def _refresh_plan(self, batch: BatchMetadata, buffers: StepBuffers) -> AttentionPlan:
        """The one plan of these buffers, for this step. Eager steps and graphs share it."""
        plan = self.model.plan_step(batch, self.geometry, reuse=self._plans[buffers])
        assert plan is self._plans[buffers], "a plan is refreshed in place"
        return plan

    def launch(self, batch: Batch) -> Flight:
        """Starts a step: its tensors, its plan, the model, the sampler. Waits for nothing.

        Args:
            batch: At least one token.

        Returns:
            The step in flight, to be read by `Flight.wait`.
        """
        self.copy_state(batch.restores)
        size = None if batch.chunks else self.graphs.size_for(batch.num_requests)
        metadata = self.builder.build(batch, padded=size)
        plan = self._refresh_plan(metadata, self.builder.mixed if batch.chunks else self.builder.decode)
        scores: list[PromptScore] = []
        if size is not None:
            self.graphs.replay(size)
            logits_RV = self._logits_RV[: batch.num_requests]
        else:
            hidden_TD = self.model.forward(metadata, plan, self.cache).hidden_TD
            logits_RV = self.model.compute_logits(hidden_TD.index_select(0, self.builder.sampled_tokens(batch)))
            scores = self._score_prompts(batch, hidden_TD)
        if not batch.sampled_rows:
            return Flight(batch=batch, ids=self._host_ids[0][:0], wait=_no_wait, prompt_scores=scores)
        drawn = self.sampler.sample(logits_RV, batch.sampled_rows)
        self.builder.keep_ids(batch, drawn.ids_R)
        ids, wait = self._read_back(drawn.ids_R)
        return Flight(batch=batch, ids=ids, wait=wait, logprobs=drawn.logprobs, prompt_scores=scores)

    def copy_state(self, copies: list[tuple[int, int]]) -> None:
        """Copies compressor state between slots (source, target)."""
        if copies:
            self.cache.copy_state([source for source, _ in copies], [target for _, target in copies])

    def _read_back(self, ids_R: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Starts the copy of the tokens to the host; buffers alternate as one step may still be unread."""
        self._turn ^= 1
        host = self._host_ids[self._turn][: len(ids_R)]
        host.copy_(ids_R, non_blocking=True)
        if self._device.type == "cpu":
            return host, _no_wait
        event = torch.Event(self._device)
        event.record()
        return host, event.synchronize

    def _score_prompts(self, batch: Batch, hidden_TD: Tensor) -> list[PromptScore]:
        """Log-probabilities of the prompt tokens that a step's chunks predict, a bounded number of rows at a time."""
        scores: list[PromptScore] = []
        first = len(batch.decode_requests)
        for chunk in batch.chunks:
            if chunk.request.scores_prompt:
                scores += self._score_chunk(chunk, hidden_TD[first : first + chunk.end - chunk.start])
            first += chunk.end - chunk.start
        return scores

    def _score_chunk(self, chunk: Chunk, hidden_TD: Tensor) -> list[PromptScore]:
        request = chunk.request
        num_top = request.admitted.params.prompt_logprobs
        assert num_top is not None
        targets = request.span(chunk.start + 1, min(chunk.end + 1, len(request.prompt)))
        scores: list[PromptScore] = []
        for start in range(0, len(targets), _SCORED_ROWS):
            wanted = torch.from_numpy(targets[start : start + _SCORED_ROWS].copy()).to(self._device)
            logits_TV = self.model.compute_logits(hidden_TD[start : start + len(wanted)])
            scores.append(PromptScore(request, chunk.start + start, self.sampler.score(logits_TV, wanted, num_top)))
        return scores


def _no_wait() -> None:
    """The device is the host: nothing to wait for."""
