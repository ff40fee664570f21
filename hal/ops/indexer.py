"""Contracts of the indexer, which picks the compressed entries that a query of a ratio-4 layer attends to.

Shapes: T tokens, H index heads, I index width (128), S entries of the longest request, K entries kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops.attention import AttentionPlan, RowSelection
    from halocline.hal.ops.kv_cache import CacheHandle
    from halocline.hal.ops.rope import RopeTable

__all__ = ["IndexQuery", "logits", "prepare_query", "select"]


class IndexQuery(NamedTuple):
    """Index queries in the form that the logits kernel takes.

    Attributes:
        q_THI: Rotated, transformed and rounded queries: float32 or bfloat16 values, or E4M3 codes without scale.
        weights_TH: float32 head weights; the scale of an E4M3 query is folded in.
    """

    q_THI: Tensor
    weights_TH: Tensor


@op(
    "indexer",
    tolerances={
        "float32": Tolerance(atol=2e-5, rtol=1e-5, norm=1e-5, reason="float32 rotation and transform"),
        "bfloat16": Tolerance(atol=0.5, rtol=0.26, norm=6e-2, reason="a bfloat16 difference may flip a low-bit step"),
    },
    semantics=("rope_pairing", "index_query", "fp8_dialect"),
)
def prepare_query(
    plan: AttentionPlan,
    q_THI: Tensor,
    weights_TH: Tensor,
    rope: RopeTable,
    *,
    rounding: Literal["none", "fp4_group32", "fp8_row"],
) -> IndexQuery:
    """Rotates the last lanes, applies the Walsh-Hadamard transform and rounds.

    Args:
        plan: Of this step; gives positions.
        q_THI: (tokens, index heads, index width) projected queries; there is no norm.
        weights_TH: (tokens, index heads) projected head weights, unscaled.
        rope: Table of compressed layers.
        rounding: Of the transformed query: groups of 32 lanes to E2M1 with a power-of-two scale, rows of 128 to E4M3
            with a float32 scale of amax / 448, or none.

    Returns:
        Queries and float32 weights * index width ** -0.5 * index heads ** -0.5 (times the E4M3 scale).

    Raises:
        ShapeError: If heads differ or the width is no power of two.
    Numerics: float32; the transform is orthonormal, natural (Sylvester) order.
    Source: DeepSeek-V4 report, lightning indexer.
    """
    raise NotImplementedError


@op(
    "indexer",
    tolerances={
        "float32": Tolerance(atol=2e-4, rtol=1e-4, norm=1e-5, reason="float32 sums over heads and lanes"),
        "bfloat16": Tolerance(atol=2e-2, rtol=1e-2, norm=2e-3, reason="products of low-bit operands, float32 sums"),
    },
    semantics=("cache_format", "fp8_dialect"),
    batch_invariant=False,
)
def logits(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> Tensor:
    """Scores the closed blocks of each query: sum over heads of weight * relu(query . key).

    Args:
        plan: Of this step; gives requests, token pages and visible counts.
        query: Of the tokens [first_token, first_token + its length) of the step. Callers split long steps so that the
            result stays within their memory bound.
        cache: Index keys of this layer.
        first_token: Where those tokens start in the step.

    Returns:
        (tokens, entries) float32; values at and behind a token's visible count are undefined.

    Raises:
        ShapeError: If the widths differ.
    Numerics: float32 accumulation.
    Source: DeepSeek-V4 report, lightning indexer.
    """
    raise NotImplementedError


@op("indexer")
def select(plan: AttentionPlan, logits_TS: Tensor, *, first_token: int, num_kept: int, page_rows: int) -> RowSelection:
    """Keeps the entries with the highest scores and maps them to cache slots through the page table.

    Args:
        plan: Of this step; gives requests, token pages and visible counts.
        logits_TS: From `logits` of the same tokens.
        first_token: Where those tokens start in the step.
        num_kept: Entries kept for each query (index_topk).
        page_rows: Rows of a token page in the compressed cache.

    Returns:
        int32 slots (tokens, num_kept) in any order and lengths min(num_kept, visible). A filler never beats an entry
        whose score is -inf.

    Raises:
        ShapeError: If the logits are narrower than the largest visible count.
    Numerics: exact set; ties are broken arbitrarily.
    Source: DeepSeek-V4 report.
    """
    raise NotImplementedError
