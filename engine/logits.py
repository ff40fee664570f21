"""Edits of logits before sampling: token masks, biases, suppressed stop tokens, penalties.

Only the rows of a step that ask for an edit are touched, and a step without any costs nothing. Index tensors are made
when the rows of a step change and reused until then.

Shapes: R rows of a step, V vocabulary, W words of 32 tokens, P penalised rows, M masked rows, S penalty slots,
E single (row, token) entries, N = 3 kinds of penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from halocline.engine.sampling_params import SamplingParams, TokenMatcher

__all__ = ["LogitEdits", "penalize", "unpack_bitmask"]

_SLOT_BLOCK = 8


@dataclass(eq=False, kw_only=True)
class _RowEdits:
    """What one engine row asks for."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    matcher: TokenMatcher | None
    slot: int | None


@dataclass(eq=False, kw_only=True)
class _StepIndex:
    """Where the rows of a step that ask for edits are; positions in the step, on the device."""

    masked: list[tuple[int, TokenMatcher]] = field(default_factory=list)
    masked_M: Tensor | None = None
    bias_rows_E: Tensor | None = None
    bias_ids_E: Tensor | None = None
    bias_values_E: Tensor | None = None
    guarded: list[tuple[int, int, tuple[int, ...], int]] = field(default_factory=list)
    penalized_P: Tensor | None = None
    slots_P: Tensor | None = None
    penalties_NP: Tensor | None = None


class LogitEdits:
    """Edits of all engine rows, and the token counts that penalties need.

    Counts take 5 bytes for each token of the vocabulary and each penalised row. They are allocated for 8 rows when the
    first such row comes and grow to the largest number of them at once.
    """

    def __init__(self, capacity: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._capacity = capacity
        self._rows: dict[int, _RowEdits] = {}
        self._counts_SV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt_SV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free_slots: list[int] = []
        self._bitmasks: NDArray[np.int32] | None = None
        self._index = _StepIndex()

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        stop_ids: Sequence[int],
        matcher: TokenMatcher | None,
    ) -> None:
        """Keeps what a row asks for; rows that ask for nothing cost nothing."""
        slot = self._take_slot(prompt_ids, output_ids) if params.penalized else None
        guard = tuple(dict.fromkeys(stop_ids)) if params.min_tokens > len(output_ids) else ()
        if slot is not None or guard or matcher is not None or params.logit_bias:
            self._rows[row] = _RowEdits(params=params, stop_ids=guard, matcher=matcher, slot=slot)

    def clear_row(self, row: int) -> None:
        """Forgets a row."""
        edits = self._rows.pop(row, None)
        if edits is not None and edits.slot is not None:
            self._free_slots.append(edits.slot)

    def refresh(self, rows: Sequence[int]) -> None:
        """Makes the index tensors of a step with these rows."""
        index = _StepIndex()
        bias: list[tuple[int, int, float]] = []
        penalized: list[tuple[int, int]] = []
        penalties: list[tuple[float, float, float]] = []
        for position, row in enumerate(rows if self._rows else ()):
            edits = self._rows.get(row)
            if edits is None:
                continue
            params = edits.params
            bias.extend((position, token_id, value) for token_id, value in params.logit_bias.items())
            if edits.matcher is not None:
                index.masked.append((position, edits.matcher))
            if edits.stop_ids:
                index.guarded.append((position, row, edits.stop_ids, params.min_tokens))
            if edits.slot is not None:
                penalized.append((position, edits.slot))
                penalties.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
        if bias:
            index.bias_rows_E = self._tensor([entry[0] for entry in bias])
            index.bias_ids_E = self._tensor([entry[1] for entry in bias])
            index.bias_values_E = torch.tensor([entry[2] for entry in bias], device=self._device)
        if penalized:
            index.penalized_P = self._tensor([position for position, _ in penalized])
            index.slots_P = self._tensor([slot for _, slot in penalized])
            index.penalties_NP = torch.tensor(penalties, device=self._device).T.contiguous()
        if index.masked:
            index.masked_M = self._tensor([position for position, _ in index.masked])
        self._index = index

    def apply_(self, logits_RV: Tensor, counters: NDArray[np.int64]) -> None:
        """Edits the logits of the step in place, in the order that `SamplingParams` states.

        Args:
            logits_RV: float32 logits of the rows given to `refresh`.
            counters: Tokens generated, by engine row.
        """
        index = self._index
        if index.masked_M is not None:
            logits_RV[index.masked_M] = logits_RV[index.masked_M].masked_fill(~self._allowed(), -torch.inf)
        if index.bias_rows_E is not None:
            assert index.bias_ids_E is not None
            assert index.bias_values_E is not None
            logits_RV.index_put_((index.bias_rows_E, index.bias_ids_E), index.bias_values_E, accumulate=True)
        for position, row, stop_ids, min_tokens in index.guarded:
            if counters[row] < min_tokens:
                logits_RV[position, list(stop_ids)] = -torch.inf
        if index.penalized_P is not None:
            assert index.slots_P is not None
            assert index.penalties_NP is not None
            logits_RV[index.penalized_P] = penalize(
                logits_RV[index.penalized_P],
                self._counts_SV[index.slots_P],
                self._prompt_SV[index.slots_P],
                index.penalties_NP,
            )

    def count_(self, ids_R: Tensor) -> None:
        """Counts the tokens drawn in the step; -1 is not counted."""
        index = self._index
        if index.penalized_P is None or index.slots_P is None:
            return
        ids_P = ids_R[index.penalized_P].long()
        self._counts_SV[index.slots_P, ids_P.clamp(min=0)] += (ids_P >= 0).int()

    def _allowed(self) -> Tensor:
        """Allowed tokens of the masked rows, filled by their matchers."""
        num_words = (self.vocab_size + 31) // 32
        if self._bitmasks is None:
            self._bitmasks = np.zeros((self._capacity, num_words), dtype=np.int32)
        for i, (_, matcher) in enumerate(self._index.masked):
            self._bitmasks[i] = 0
            matcher.fill(self._bitmasks[i])
        words_MW = torch.from_numpy(self._bitmasks[: len(self._index.masked)]).to(self._device)
        return unpack_bitmask(words_MW, self.vocab_size)

    def _take_slot(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        if not self._free_slots:
            have = self._counts_SV.shape[0]
            more = (_SLOT_BLOCK, self.vocab_size)
            self._counts_SV = torch.cat([self._counts_SV, self._counts_SV.new_zeros(more)])
            self._prompt_SV = torch.cat([self._prompt_SV, self._prompt_SV.new_zeros(more)])
            self._free_slots.extend(range(have, have + _SLOT_BLOCK))
        slot = self._free_slots.pop()
        self._prompt_SV[slot].zero_()
        self._prompt_SV[slot, self._tensor(prompt_ids)] = True
        counts = torch.bincount(torch.tensor(output_ids, dtype=torch.int64), minlength=self.vocab_size)
        self._counts_SV[slot].copy_(counts)
        return slot

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def penalize(logits_PV: Tensor, counts_PV: Tensor, prompt_PV: Tensor, penalties_NP: Tensor) -> Tensor:
    """Logits after the repetition penalty, then the frequency and presence penalties.

    Args:
        logits_PV: float32 logits.
        counts_PV: int32 times that the output contains each token.
        prompt_PV: Whether the prompt contains each token.
        penalties_NP: Repetition, frequency and presence penalty of each row.

    Source: repetition after Keskar et al., CTRL, 2019, section 4.1; the others as OpenAI states them.
    """
    repetition_P1, frequency_P1, presence_P1 = penalties_NP[:, :, None]
    seen_PV = counts_PV > 0
    scaled_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
    logits_PV = torch.where(seen_PV | prompt_PV, scaled_PV, logits_PV)
    taken_PV: Tensor = counts_PV * frequency_P1 + seen_PV * presence_P1
    return logits_PV - taken_PV


def unpack_bitmask(words_MW: Tensor, vocab_size: int) -> Tensor:
    """(rows, vocabulary) booleans of bit masks in which bit i of word w stands for token 32 w + i."""
    shifts_32 = torch.arange(32, dtype=torch.int32, device=words_MW.device)
    bits = (words_MW[:, :, None] >> shifts_32) & 1
    return bits.bool().reshape(words_MW.shape[0], -1)[:, :vocab_size]
