"""Contracts of sampling. R rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from halocline.hal.op import op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SamplingBatch", "sample"]


@dataclass(eq=False, kw_only=True)
class SamplingBatch:
    """How each row is sampled. Tensors are views of persistent buffers.

    Attributes:
        temperature_R: float32; 0 means the largest logit, lowest id on a tie.
        top_k_R: int32; 0 means all.
        top_p_R: float32 in (0, 1].
        min_p_R: float32 in [0, 1).
        seeds_R: int64 seed of the request.
        counters_R: int64 number of tokens that the request has generated: with the seed it alone names the draw.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seeds_R: Tensor
    counters_R: Tensor


@op("sampling")
def sample(logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """Draws one token for each row.

    Args:
        logits_RV: (rows, vocabulary) float32, penalties, biases and masks applied already.
        batch: Parameters of each row.

    Returns:
        (rows,) int32 ids. The order of restriction is temperature, top-k, top-p, min-p; a row of NaN gives -1.

    Raises:
        ShapeError: If rows differ.
    Numerics: float32 softmax. Draws come from a counter-based generator (Philox 4x32-10 keyed by the seed, counter =
        tokens generated), as Gumbel noise over the vocabulary, so that a draw depends on nothing but the request.
    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    raise NotImplementedError
