"""Sampling by the portable kernels. R rows, V ids."""

from __future__ import annotations

from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.sampling import SamplingBatch, sample
from halocline.kernels_portable.sampling_pick import sample_tokens

__all__ = ["sample_triton"]


@implements(sample)
def sample_triton(logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """See the contract."""
    shapes = {name: tuple(part.shape) for name, part in vars(batch).items()}
    if set(shapes.values()) != {logits_RV.shape[:1]}:
        raise ShapeError(f"{logits_RV.shape[0]} rows of logits, parameters of shapes {shapes}")
    return sample_tokens(
        logits_RV.contiguous(),
        batch.temperature_R,
        batch.top_k_R,
        batch.top_p_R,
        batch.min_p_R,
        batch.seeds_R,
        batch.counters_R,
    )
