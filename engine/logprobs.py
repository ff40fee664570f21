"""Log-probabilities of chosen and of the most likely tokens, computed for the rows that ask.

Shapes: R rows of a step, V vocabulary, L rows that ask, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.engine.logprob_values import TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogprobRows", "score_rows"]


@dataclass(eq=False, kw_only=True)
class LogprobRows:
    """Log-probabilities of the rows that asked, on the device until `to_host`.

    Attributes:
        positions: Position in the step of each row that asked.
        num_top: How many most likely tokens each of them wants.
        positions_L: `positions` on the device.
        normed_LV: Log-probabilities of all tokens, until the token is chosen.
        ids_L: Chosen token.
        chosen_L: Its log-probability.
        top_ids_LK: Most likely tokens, K being the largest wish.
        top_values_LK: Their log-probabilities.
    """

    positions: list[int]
    num_top: list[int]
    positions_L: Tensor
    normed_LV: Tensor | None
    ids_L: Tensor
    chosen_L: Tensor
    top_ids_LK: Tensor
    top_values_LK: Tensor

    @classmethod
    def before_edits(cls, logits_RV: Tensor, asked: Sequence[int | None]) -> LogprobRows:
        """Of the rows whose entry in `asked` is a number: how many most likely tokens they want."""
        positions = [position for position, wish in enumerate(asked) if wish is not None]
        num_top = [wish for wish in asked if wish is not None]
        positions_L = torch.tensor(positions, device=logits_RV.device)
        normed_LV = torch.log_softmax(logits_RV[positions_L].float(), dim=-1)
        top_values_LK, top_ids_LK = _top(normed_LV, max(num_top))
        nothing = torch.empty(0, device=logits_RV.device)
        return cls(
            positions=positions,
            num_top=num_top,
            positions_L=positions_L,
            normed_LV=normed_LV,
            ids_L=nothing,
            chosen_L=nothing,
            top_ids_LK=top_ids_LK,
            top_values_LK=top_values_LK,
        )

    def choose(self, ids_R: Tensor) -> None:
        """Takes the tokens drawn; -1 (a failed row) counts as token 0 of a row whose numbers nobody reads."""
        assert self.normed_LV is not None, "tokens are chosen once"
        self.ids_L = ids_R[self.positions_L].long()
        self.chosen_L = self.normed_LV.gather(-1, self.ids_L.clamp(min=0)[:, None])[:, 0]
        self.normed_LV = None

    def to_host(self) -> dict[int, TokenLogprob]:
        """Waits for the device; log-probabilities by position in the step."""
        ids, chosen = self.ids_L.tolist(), self.chosen_L.tolist()
        top_ids, top_values = self.top_ids_LK.tolist(), self.top_values_LK.tolist()
        return {
            position: TokenLogprob(
                token_id=ids[i],
                logprob=chosen[i],
                top=tuple(zip(top_ids[i][: self.num_top[i]], top_values[i][: self.num_top[i]], strict=True)),
            )
            for i, position in enumerate(self.positions)
        }


def score_rows(logits_TV: Tensor, targets_T: Tensor, num_top: int) -> LogprobRows:
    """Log-probabilities of given tokens, one in each row of logits."""
    rows = LogprobRows.before_edits(logits_TV, [num_top] * logits_TV.shape[0])
    rows.choose(targets_T)
    return rows


def _top(normed_LV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values, best first, and their ids, lowest first among equal values that were kept."""
    _, ids_LK = torch.topk(normed_LV, min(count, normed_LV.shape[-1]), dim=-1, sorted=False)
    ids_LK = ids_LK.sort(dim=-1).values
    values_LK, order_LK = normed_LV.gather(-1, ids_LK).sort(dim=-1, descending=True, stable=True)
    return values_LK, ids_LK.gather(-1, order_LK)
