"""ModelRunner: carries out plans on the model. The same on every rank: it decides nothing and samples nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from halocline.engine.graphs import DecodeGraphs, GraphCapture
from halocline.engine.prompt_scores import MOST_ROWS
from halocline.engine.step_tensors import StepTensors
from halocline.engine.warm_up import warm_up_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from halocline.engine.config import EngineConfig
    from halocline.engine.logit_exchange import LogitExchange
    from halocline.engine.memory_plan import MemoryPlan
    from halocline.engine.step_plan import StepPlan
    from halocline.engine.warm_up import Builder
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.batch import BatchMetadata
    from halocline.models.interface import CausalModel, ModelCache

__all__ = ["ModelRunner", "StepResult"]


class StepResult(NamedTuple):
    """What the model made of a step.

    Attributes:
        logits: float32 (rows, vocabulary) of the rows to sample, of each attention group; none where no group samples.
        hidden_TD: Hidden rows, for scoring prompts; None after a replayed graph.
    """

    logits: tuple[Tensor, ...]
    hidden_TD: Tensor | None


class ModelRunner:
    """The model, its caches and the tensors of its steps, on one rank."""

    def __init__(
        self,
        model: CausalModel,
        memory: MemoryPlan,
        config: EngineConfig,
        *,
        device: torch.device,
        capture: GraphCapture | None = None,
        exchange: LogitExchange | None = None,
        build: Builder | None = None,
    ) -> None:
        """Allocates the caches and all buffers; `warm_up` makes it ready.

        Args:
            model: The network.
            memory: Sizes; compared with what is allocated.
            config: Resolved.
            device: Where the model runs.
            capture: The backend's graphs, needed when `config.graph_sizes` has sizes.
            exchange: What several ranks exchange around sampling; None for one process.
            build: Compiles in parallel what a function launches; None leaves kernels to their first launch.
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
        self.tensors = StepTensors(
            num_rows=memory.max_requests,
            max_positions=memory.max_positions,
            max_step_tokens=config.max_step_tokens,
            window_unit=self.geometry.window_page_rows,
            token_unit=self.geometry.page_tokens,
            device=device,
        )
        self.graphs = DecodeGraphs(config.graph_sizes if capture is not None else ())
        self.device = device
        self._capture = capture
        self._warm_up_steps = warm_up_steps(
            config.warm_up_tokens,
            max_requests=memory.max_requests,
            max_step_tokens=config.max_step_tokens,
            max_positions=memory.max_positions,
        )
        self._exchange = exchange
        self._build = build
        self._plans: dict[bool, AttentionPlan] = {}
        self._logits_RV = torch.zeros(0, 0)

    def warm_up(self) -> float:
        """Makes the plans at capacity, runs the steps of `engine.warm_up` on padding and records the graphs.

        Returns:
            Seconds that it took.
        """
        start = time.perf_counter()
        for mixed, buffers in ((True, self.tensors.mixed), (False, self.tensors.decode)):
            everything = self.tensors.padding(buffers, buffers.layout.max_tokens, buffers.layout.max_requests)
            self._plans[mixed] = self.model.plan_step(everything, self.geometry, reuse=None)
        if self._build is not None:
            self._build(functools.partial(self._try_steps, layers=self.model.distinct_layers))
        self._try_steps()
        if self._capture is not None and self.graphs.sizes:
            sizes = (self.graphs.sizes[-1], self.model.vocab_size)
            self._logits_RV = torch.zeros(sizes, dtype=torch.float32, device=self.device)
            self.graphs.record(self._capture, self._padded_step)
        return time.perf_counter() - start

    def _try_steps(self, layers: Sequence[int] | None = None) -> None:
        """Runs the steps of the warm-up on padding, through all layers or some; nobody looks at what they compute."""
        for step in self._warm_up_steps:
            batch = self.tensors.padding(
                self.tensors.mixed if step.mixed else self.tensors.decode,
                step.num_tokens,
                step.num_requests,
                num_decode=step.num_decode,
                max_seqlen=step.max_seqlen,
            )
            plan = self._refresh_plan(batch, mixed=step.mixed)
            output = self.model.forward(batch, plan, self.cache, layers=layers)
            self.model.compute_logits(output.hidden_TD[:MOST_ROWS])

    def _padded_step(self, size: int) -> Callable[[], None]:
        """The function that a graph of this size records."""
        batch = self.tensors.padding(self.tensors.decode, size, size)
        plan = self._refresh_plan(batch, mixed=False)

        def run() -> None:
            self._logits_RV[:size].copy_(self._run_all(batch, plan))

        return run

    def _run_all(self, batch: BatchMetadata, plan: AttentionPlan) -> Tensor:
        """Logits of all tokens of a step."""
        return self.model.compute_logits(self.model.forward(batch, plan, self.cache).hidden_TD)

    def _refresh_plan(self, batch: BatchMetadata, *, mixed: bool) -> AttentionPlan:
        """The one attention plan of these buffers, for this step. Eager steps and graphs share it."""
        plan = self.model.plan_step(batch, self.geometry, reuse=self._plans[mixed])
        assert plan is self._plans[mixed], "a plan is refreshed in place"
        return plan

    def run(self, plan: StepPlan) -> StepResult:
        """Starts a step: its tensors, its attention plan, the model. Waits for nothing."""
        batch = self.tensors.apply(plan)
        shape = plan.shape
        attention = self._refresh_plan(batch, mixed=shape.mixed)
        if shape.graph_size:
            self.graphs.replay(shape.graph_size)
            return StepResult(self._gathered(self._logits_RV[: shape.sampled]), None)
        hidden_TD = self.model.forward(batch, attention, self.cache).hidden_TD
        if not shape.sampled:
            return StepResult((), hidden_TD)
        wanted_RD = hidden_TD.index_select(0, self.tensors.sampled_tokens(plan))
        return StepResult(self._gathered(self.model.compute_logits(wanted_RD)), hidden_TD)

    def scored_logits(self, plan: StepPlan, result: StepResult, number: int) -> tuple[Tensor, ...]:
        """Logits by attention group of one round of prompt rows; every rank calls it for every round of the plan."""
        assert result.hidden_TD is not None, "prompts are not scored in graphs"
        first, count = plan.scored[number]
        rows_RD = result.hidden_TD[first : first + count]
        if count < plan.shape.scored[number]:
            padding = rows_RD.new_zeros(plan.shape.scored[number] - count, rows_RD.shape[1])
            rows_RD = torch.cat((rows_RD, padding))
        return self._gathered(self.model.compute_logits(rows_RD))

    def _gathered(self, logits_RV: Tensor) -> tuple[Tensor, ...]:
        return (logits_RV,) if self._exchange is None else self._exchange.gather(logits_RV)

    def keep_ids(self, plan: StepPlan, ids: Sequence[Tensor]) -> None:
        """Stores what was sampled for the next step, here and, if there are others, on every rank.

        Args:
            plan: Of this rank's attention group, the first.
            ids: Tokens of each group's sampled rows.
        """
        if self._exchange is not None:
            self._exchange.send_ids(ids, plan.shape.sampled)
        self.tensors.keep_ids(plan, ids[0])

    def follow(self, plan: StepPlan) -> None:
        """Carries out a plan of the rank that schedules, up to the tokens that it sampled.

        Raises:
            StepMismatchError: If this rank would enter other collectives than the plan says.
        """
        if plan.shape.num_tokens == 0:
            self.tensors.apply_changes(plan)
            return
        assert self._exchange is not None, "a rank that follows has others"
        self.graphs.check(plan.shape)
        self.copy_state(plan.copies)
        self.copy_state(plan.restores)
        result = self.run(plan)
        for number in range(len(plan.shape.scored)):
            self.scored_logits(plan, result, number)
        if plan.shape.sampled:
            self.tensors.keep_ids(plan, self._exchange.receive_ids(plan.shape.sampled)[: plan.num_sampled])

    def copy_state(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies compressor state between slots (source, target)."""
        if copies:
            self.cache.copy_state([source for source, _ in copies], [target for _, target in copies])
