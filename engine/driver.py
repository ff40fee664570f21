"""StepDriver: turns batches into plans, has them carried out on every rank, samples. On the rank that schedules.

Tokens are read one step late: `launch` waits for nothing, `Flight.wait` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from halocline.engine.batch_builder import BatchBuilder
from halocline.engine.prompt_scores import ScoredRows, scored_rows
from halocline.engine.step_plan import StepPlan, StepShape

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.engine.batch import Batch
    from halocline.engine.config import EngineConfig
    from halocline.engine.logprob_values import TokenLogprob
    from halocline.engine.row_table import RowTable
    from halocline.engine.runner import ModelRunner, StepResult

__all__ = ["Flight", "PlanSender", "PromptScore", "Sampling", "StepDriver"]


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


class PlanSender(Protocol):
    """The way to the other ranks."""

    def add(self, group: int, plan: StepPlan) -> None:
        """Puts a plan of a group into the next message; its buffer may be filled again afterwards."""
        ...

    def send(self) -> None:
        """Sends the message to all ranks."""
        ...


class PromptScore(NamedTuple):
    """Log-probabilities of prompt tokens."""

    rows: ScoredRows
    logprobs: Logprobs


@dataclass(eq=False, kw_only=True)
class Flight:
    """A step of one attention group that has been launched and not been read.

    Attributes:
        batch: The step.
        ids: Its tokens, on the host once `wait` has returned.
        wait: Waits for the device to reach the end of the step.
        logprobs: Of the sampled tokens of all groups, if any request asked.
        first: Where this group's tokens begin among them.
        prompt_scores: Log-probabilities of prompt tokens, in order.
    """

    batch: Batch
    ids: Tensor
    wait: Callable[[], None]
    logprobs: Logprobs | None = None
    first: int = 0
    prompt_scores: list[PromptScore] = field(default_factory=list)


class StepDriver:
    """Launches steps: one attention group in one process, or several groups on several ranks in step."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampling,
        tables: Sequence[RowTable],
        config: EngineConfig,
        *,
        sender: PlanSender | None = None,
    ) -> None:
        """Allocates the host's buffers.

        Args:
            runner: This rank's.
            sampler: Draws tokens, for as many rows as all groups have.
            tables: Engine rows of each attention group; this rank works in the first.
            config: Resolved.
            sender: The way to the other ranks; None for one process.
        """
        assert config.max_positions is not None, "a resolved configuration"
        self.runner = runner
        self.sampler = sampler
        self.sender = sender
        self._device = runner.device
        pin = self._device.type != "cpu"
        self._tables = tables
        self.builders = [
            BatchBuilder(table, max_step_tokens=config.max_step_tokens, max_positions=config.max_positions, pin=pin)
            for table in tables
        ]
        num_rows = sum(table.num_rows for table in tables)
        self._host_ids = [torch.zeros(num_rows, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._turn = 0

    def launch(self, batches: Sequence[Batch]) -> list[Flight]:
        """Starts a step: plans, the model on every rank, the sampler.

        Args:
            batches: Of each attention group; one of them brings at least one token.

        Returns:
            The step in flight, group by group, to be read by `Flight.wait`.
        """
        scored = [scored_rows(batch) for batch in batches]
        shape = self._decide(batches, scored)
        own, runner = batches[0], self.runner
        runner.copy_state(own.copies)
        runner.copy_state(own.restores)
        plan = self._send_plans(batches, shape, scored)
        result = runner.run(plan)
        scores = self._score_prompts(plan, result, scored)
        if not result.logits:
            nothing = self._host_ids[0][:0]
            return [
                Flight(batch=batch, ids=nothing, wait=_no_wait, prompt_scores=found)
                for batch, found in zip(batches, scores, strict=True)
            ]
        return self._sample(plan, result.logits, batches, scores)

    def resync(self) -> None:
        """Copies all page tables again, after a step that failed on its way to the device."""
        self.runner.tensors.resync(self._tables[0])

    # ---- plans --------------------------------------------------------------------------------------------------

    def _decide(self, batches: Sequence[Batch], scored: Sequence[Sequence[ScoredRows]]) -> StepShape:
        """Everything from which collectives follow: once, here, for all ranks."""
        if not any([batch.chunks for batch in batches]):
            count = max([len(batch.decode_requests) for batch in batches])
            size = self.runner.graphs.size_for(count) or 0
            return StepShape(mixed=False, num_tokens=size or count, sampled=count, graph_size=size)
        rounds = range(max(len(rows) for rows in scored))
        return StepShape(
            mixed=True,
            num_tokens=max(batch.num_tokens for batch in batches),
            sampled=max(len(batch.sampled_rows) for batch in batches),
            scored=tuple(max(rows[i].num_rows for rows in scored if i < len(rows)) for i in rounds),
        )

    def _send_plans(
        self, batches: Sequence[Batch], shape: StepShape, scored: Sequence[Sequence[ScoredRows]]
    ) -> StepPlan:
        """Builds and sends the plan of each group; returns that of this rank's own, the first."""
        own: StepPlan | None = None
        sender, rounds = self.sender, len(shape.scored)
        for group, builder in enumerate(self.builders):
            rows = scored[group]
            spans = (
                tuple((one.first, one.num_rows) for one in rows) + ((0, 0),) * (rounds - len(rows)) if rounds else ()
            )
            for plan in builder.plans(batches[group], shape, spans):
                if sender is not None:
                    sender.add(group, plan)
                if group == 0 and plan.shape.num_tokens:
                    own = plan
                elif group == 0:
                    self.runner.tensors.apply_changes(plan)
        if sender is not None:
            sender.send()
        assert own is not None, "the last plan of a group is its step"
        return own

    # ---- what comes of them -------------------------------------------------------------------------------------

    def _sample(
        self,
        plan: StepPlan,
        logits: Sequence[Tensor],
        batches: Sequence[Batch],
        scores: Sequence[list[PromptScore]],
    ) -> list[Flight]:
        """Draws the tokens of all groups at once and starts their way back."""
        if len(batches) == 1:
            drawn = self.sampler.sample(logits[0], batches[0].sampled_rows)
            self.runner.keep_ids(plan, (drawn.ids_R,))
            ids, wait = self._read_back(drawn.ids_R)
            return [Flight(batch=batches[0], ids=ids, wait=wait, logprobs=drawn.logprobs, prompt_scores=scores[0])]
        counts = [len(batch.sampled_rows) for batch in batches]
        logits_RV = torch.cat([group[:count] for group, count in zip(logits, counts, strict=True)])
        rows: tuple[int, ...] = ()
        first_row = 0
        for batch, table in zip(batches, self._tables, strict=True):
            rows += tuple(row + first_row for row in batch.sampled_rows)
            first_row += table.num_rows
        drawn = self.sampler.sample(logits_RV, rows)
        self.runner.keep_ids(plan, drawn.ids_R.split(counts))
        ids, wait = self._read_back(drawn.ids_R)
        flights, first = [], 0
        for batch, found, count in zip(batches, scores, counts, strict=True):
            flights.append(
                Flight(
                    batch=batch,
                    ids=ids[first : first + count],
                    wait=wait,
                    logprobs=drawn.logprobs,
                    first=first,
                    prompt_scores=found,
                )
            )
            first += count
        return flights

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

    def _score_prompts(
        self, plan: StepPlan, result: StepResult, scored: Sequence[Sequence[ScoredRows]]
    ) -> list[list[PromptScore]]:
        """Log-probabilities of the prompt tokens that the step's chunks predict, round by round."""
        scores: list[list[PromptScore]] = [[] for _ in scored]
        for number in range(len(plan.shape.scored)):
            logits = self.runner.scored_logits(plan, result, number)
            for group, rows in enumerate(scored):
                if number < len(rows):
                    scores[group].append(self._score(rows[number], logits[group]))
        return scores

    def _score(self, rows: ScoredRows, logits_TV: Tensor) -> PromptScore:
        num_top = rows.request.admitted.params.prompt_logprobs
        assert num_top is not None
        wanted = torch.from_numpy(rows.targets.copy()).to(self._device)
        return PromptScore(rows, self.sampler.score(logits_TV[: rows.num_rows], wanted, num_top))


def _no_wait() -> None:
    """The device is the host: nothing to wait for."""
