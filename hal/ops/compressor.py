"""Contracts of the compressors that pool closed blocks of tokens into one cache row.

Shapes: T tokens, C projected lanes (2 * width for ratio 4, width for ratio 128), D width of an entry, S state slots,
B rows of a request's state ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.kv_cache import CacheHandle
    from halocline.hal.ops.rope import RopeTable

__all__ = ["CompressorState", "allocate_state", "insert"]


@dataclass(eq=False, kw_only=True)
class CompressorState:
    """Projected rows of each request that later entries still need: a ring addressed by position modulo its length.

    Attributes:
        rows_SB2C: float32 (slots, ring rows, 2, lanes), lanes contiguous: values at index 0, scores with the position
            bias at 1. Only rows of positions already fed are ever read, so a reused slot needs no clearing. It may be
            a view of some lanes of a wider state, which is how the compressors of all layers share one buffer.
        ratio: Tokens of a block.
    """

    rows_SB2C: Tensor
    ratio: int


@op("compressor")
def allocate_state(num_slots: int, lanes: int, *, ratio: int, extra_rows: int, device: str) -> CompressorState:
    """Allocates the state of one compressor, or of several of one ratio, whose lanes lie side by side.

    Args:
        num_slots: Requests that may be in flight.
        lanes: Projected lanes C, of all of them.
        ratio: Tokens of a block: 4 keeps two blocks (they overlap), 128 keeps one.
        extra_rows: Ring rows beyond that, so that rejected drafts overwrite nothing that is needed.
        device: Where, in torch's words.

    Returns:
        The state; its bytes are exactly num_slots * ring rows * 2 * lanes * 4. What it holds is undefined.

    Raises:
        OutOfPagesError: If the device has not enough memory, with both numbers.
    Numerics: float32 rows, whatever the compute type.
    """
    raise NotImplementedError


@op(
    "compressor",
    tolerances={
        "float32": Tolerance(atol=2e-5, rtol=1e-5, norm=1e-5, reason="float32 softmax, norm and rotation"),
        "bfloat16": Tolerance(atol=0.13, rtol=7e-2, norm=1.5e-2, reason="a bfloat16 difference may flip one E4M3 step"),
    },
    semantics=("cache_format", "fp8_dialect", "rope_pairing"),
    mutates=("state", "cache"),
)
def insert(
    plan: AttentionPlan,
    values_TC: Tensor,
    scores_TC: Tensor,
    position_bias_RC: Tensor,
    norm_weight_D: Tensor,
    rope: RopeTable,
    state: CompressorState,
    cache: CacheHandle,
    *,
    eps: float,
) -> None:
    """Feeds the tokens of a step to a compressor and stores every entry whose block they close.

    Entry j of a request is made by the token at position (j + 1) * ratio - 1 and stored in the token page of that
    position, row j modulo page rows. Ratio 128 pools the block lane-wise: softmax over its tokens of the scores, times
    the values. Ratio 4 pools eight rows: lanes [0, D) of the four tokens of block j - 1 and lanes [D, 2D) of block j;
    block -1 does not exist and is left out. The entry is normed with a gain and rotated at position j * ratio, its
    block's first. A latent cache stores it as it is; an index-key cache stores its normalised Walsh-Hadamard transform
    (natural order).

    Args:
        plan: Of this step; gives positions, requests, state slots and token pages. Padding is ignored.
        values_TC: (tokens, lanes) float32.
        scores_TC: (tokens, lanes) float32, without the position bias.
        position_bias_RC: (ratio, lanes) float32, added to the scores by position modulo ratio.
        norm_weight_D: (width,) gain.
        rope: Table of compressed layers.
        state: Rows of earlier steps; refreshed in place.
        cache: Where entries go; written in place.
        eps: Added to the mean square.

    Raises:
        ShapeError: If lanes, ratio and width do not fit each other.
    Numerics: float32 until the pooled entry, which is rounded once to the compute type (bfloat16 unless the cache row
        is float32) before the norm, then float32, one rounding, then the rounding of the row format.
    Source: DeepSeek-V4 report, compressed sparse attention and heavily compressed attention.
    """
    raise NotImplementedError
