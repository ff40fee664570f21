"""Sampler: from logits to tokens, with the parameters of each engine row in persistent buffers.

A row is a place in the engine (0 to capacity - 1) that a request holds while it runs. The tensors that the sampling
kernel reads are views of one buffer, refreshed by one upload when the rows of a step or a parameter changed, and
advanced on the device otherwise: their addresses never change, so a captured graph may read them.

Shapes: R rows of a step, V vocabulary, L rows that want log-probabilities, K most likely tokens, T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from halocline.engine.logits import LogitEdits
from halocline.engine.logprobs import LogprobRows, score_rows
from halocline.hal.ops.sampling import SamplingBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from halocline.engine.sampling_params import SamplingParams, TokenMatcher
    from halocline.engine.warm_up import Builder

__all__ = ["SampledTokens", "Sampler", "SamplingOps"]


class SamplingOps(Protocol):
    """The part of `halocline.hal.ops.Ops` that the sampler calls."""

    @property
    def sampling(self) -> Any:
        """The bound kernels of the family: `sample`."""
        ...


@dataclass(eq=False, kw_only=True)
class SampledTokens:
    """What one step drew. Tensors live on the device and may be read later.

    Attributes:
        ids_R: int32 ids; -1 where the logits were NaN or nothing was allowed: that request fails, the others live.
            A view of a persistent buffer: the next call of `sample` overwrites it.
        logprobs: Of the rows that asked, else None.
    """

    ids_R: Tensor
    logprobs: LogprobRows | None


class Sampler:
    """Draws tokens for the rows of a step.

    Log-probabilities are those of the model: before masks, biases, penalties and temperature.
    """

    def __init__(self, capacity: int, vocab_size: int, ops: SamplingOps, device: torch.device | str) -> None:
        self.capacity = capacity
        self.vocab_size = vocab_size
        self._ops = ops
        self._taken = [False] * capacity
        self._wishes: dict[int, int] = {}
        self._by_row = _Columns(capacity, torch.device("cpu"))
        self._host = _Columns(capacity, torch.device("cpu"))
        self._step = _Columns(capacity, torch.device(device))
        self._ids = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._edits = LogitEdits(capacity, vocab_size, torch.device(device))
        self._rows: tuple[int, ...] = ()
        self._row_index = np.zeros(0, dtype=np.int64)
        self._asked: list[int | None] = []
        self._dirty = True

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        stop_ids: Sequence[int] = (),
        matcher: TokenMatcher | None = None,
    ) -> None:
        """Gives a row to a request, new or resumed after preemption.

        Args:
            row: A free row.
            params: Admitted parameters: the seed is set.
            prompt_ids: The prompt.
            output_ids: Tokens generated before, all of them.
            stop_ids: Tokens that `min_tokens` suppresses: the model's end tokens and the request's stop tokens.
            matcher: State of the request's token mask, past `output_ids`.
        """
        assert not self._taken[row], f"row {row} is taken"
        assert params.seed is not None, "a request gets its seed when it is admitted"
        self._taken[row] = True
        values = self._by_row.numpy
        values.temperature[row] = params.temperature
        values.top_k[row] = min(params.top_k, self.vocab_size)
        values.top_p[row] = params.top_p
        values.min_p[row] = params.min_p
        values.seeds[row] = params.seed
        values.counters[row] = len(output_ids)
        if params.logprobs is not None:
            self._wishes[row] = params.logprobs
        self._edits.set_row(row, params, prompt_ids, output_ids, stop_ids=stop_ids, matcher=matcher)
        self._dirty = True

    def clear_row(self, row: int) -> None:
        """Frees a row and everything kept for it. Clearing a free row does nothing."""
        self._taken[row] = False
        self._wishes.pop(row, None)
        self._edits.clear_row(row)
        self._dirty = True

    def warm_up(self, build: Builder | None = None) -> None:
        """Draws from even logits of 1, 2, 4 ... rows, so that nothing is compiled later; no row is changed.

        Args:
            build: Compiles in parallel what that launches, before it does.
        """
        if build is not None:
            build(self._try_draws)
        self._try_draws()

    def _try_draws(self) -> None:
        for num_rows in {1 << bit for bit in range(self.capacity.bit_length())} | {self.capacity}:
            logits_RV = torch.zeros(num_rows, self.vocab_size, device=self._ids.device)
            self._ops.sampling.sample(logits_RV, self._step.batch(num_rows))

    def sample(self, logits_RV: Tensor, rows: Sequence[int]) -> SampledTokens:
        """Draws one token for each row and advances the rows.

        Args:
            logits_RV: float32; changed in place by masks, biases and penalties.
            rows: Engine row of each row of logits, each at most once.

        Returns:
            The tokens, on the device; nothing is waited for unless a row has a token mask.
        """
        num_rows = len(rows)
        self._refresh(tuple(rows))
        logprobs = LogprobRows.before_edits(logits_RV, self._asked) if self._asked else None
        counters = self._by_row.numpy.counters
        self._edits.apply_(logits_RV, counters)
        ids_R = self._ids[:num_rows]
        ids_R.copy_(self._ops.sampling.sample(logits_RV, self._step.batch(num_rows)))
        self._edits.count_(ids_R)
        counters[self._row_index] += 1
        self._step.counters[:num_rows] += 1
        if logprobs is not None:
            logprobs.choose(ids_R)
        return SampledTokens(ids_R=ids_R, logprobs=logprobs)

    def score(self, logits_TV: Tensor, targets_T: Tensor, num_top: int) -> LogprobRows:
        """Log-probabilities of given tokens, for prompts: row t of logits is judged at `targets_T[t]`."""
        return score_rows(logits_TV, targets_T, num_top)

    def _refresh(self, rows: tuple[int, ...]) -> None:
        """Uploads the parameters of the step's rows if anything but the counters changed."""
        if rows == self._rows and not self._dirty:
            return
        assert len(set(rows)) == len(rows) <= self.capacity, "rows of a step are distinct"
        for row in rows:
            assert self._taken[row], f"row {row} is free"
        index = np.array(rows, dtype=np.int64)
        columns: Iterable[tuple[NDArray[Any], NDArray[Any]]] = zip(self._host.numpy, self._by_row.numpy, strict=True)
        for target, source in columns:
            target[: len(rows)] = source[index]
        self._step.words.copy_(self._host.words)
        self._edits.refresh(rows)
        self._asked = [self._wishes.get(row) for row in rows] if not self._wishes.keys().isdisjoint(rows) else []
        self._rows, self._row_index, self._dirty = rows, index, False


class _Values(NamedTuple):
    """Parameters as arrays that share memory with `_Columns`."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    counters: NDArray[np.int64]


class _Columns:
    """The columns of a SamplingBatch at capacity, as views of one buffer of 32-bit words."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        even = capacity + capacity % 2
        self.words = torch.zeros(8 * even, dtype=torch.int32, device=device)
        parts = [self.words[i * even : (i + 1) * even] for i in range(4)]
        self.temperature = parts[0].view(torch.float32)
        self.top_k = parts[1]
        self.top_p = parts[2].view(torch.float32)
        self.min_p = parts[3].view(torch.float32)
        self.seeds = self.words[4 * even : 6 * even].view(torch.int64)
        self.counters = self.words[6 * even : 8 * even].view(torch.int64)
        self._batches: dict[int, SamplingBatch] = {}

    @cached_property
    def numpy(self) -> _Values:
        """The columns as arrays, on the host only."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.counters)
        return _Values(*(column.numpy() for column in columns))

    def batch(self, num_rows: int) -> SamplingBatch:
        """Views of the first rows, made once for each count."""
        found = self._batches.get(num_rows)
        if found is None:
            found = self._batches[num_rows] = SamplingBatch(
                temperature_R=self.temperature[:num_rows],
                top_k_R=self.top_k[:num_rows],
                top_p_R=self.top_p[:num_rows],
                min_p_R=self.min_p[:num_rows],
                seeds_R=self.seeds[:num_rows],
                counters_R=self.counters[:num_rows],
            )
        return found
