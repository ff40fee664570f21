"""Which hidden rows of a step give log-probabilities of prompt tokens, a bounded number at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from halocline.engine.batch import Batch
    from halocline.engine.request import Request

__all__ = ["MOST_ROWS", "ScoredRows", "scored_rows"]

MOST_ROWS = 1024  # of a computation of logits


class ScoredRows(NamedTuple):
    """Consecutive hidden rows, each of which predicts a known token.

    Attributes:
        request: Whose prompt.
        position: Of the first row in the prompt; it predicts the token behind.
        first: First row in the step.
        num_rows: Rows.
    """

    request: Request
    position: int
    first: int
    num_rows: int

    @property
    def targets(self) -> NDArray[np.int32]:
        """The tokens that the rows predict."""
        return self.request.span(self.position + 1, self.position + 1 + self.num_rows)


def scored_rows(batch: Batch) -> list[ScoredRows]:
    """The rows of a step that score prompts, in order."""
    found: list[ScoredRows] = []
    first = len(batch.decode_requests)
    for chunk in batch.chunks:
        request = chunk.request
        if request.scores_prompt:
            stop = min(chunk.end, len(request.prompt) - 1)
            for start in range(chunk.start, stop, MOST_ROWS):
                count = min(MOST_ROWS, stop - start)
                found.append(ScoredRows(request, start, first + start - chunk.start, count))
        first += chunk.end - chunk.start
    return found
