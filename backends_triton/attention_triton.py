"""Attention by the portable kernels. Shapes as in `halocline.hal.ops.attention`."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from halocline.backends_triton.gemm_triton import TritonWeight, prepare_weight, stored_matrices
from halocline.backends_triton.row_widths import whole_rows
from halocline.backends_triton.step_plan import make_plan
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight
from halocline.hal.op import implements
from halocline.hal.ops.attention import (
    AttentionOutput,
    AttentionPlan,
    PrefillLayout,
    RowSelection,
    output,
    plan,
    prepare_query,
    sparse_decode,
    sparse_prefill,
)
from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
from halocline.hal.ops.gemm import PreparedWeight, prepare_linear
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable
from halocline.kernels_portable.linear_layer import project_outputs
from halocline.kernels_portable.query_norm_rope import query_norm_rope
from halocline.kernels_portable.sparse_attention import (
    SelectedRows,
    attention_tiles,
    num_attention_splits,
    sparse_attention,
)
from halocline.kernels_portable.target import target_of

__all__ = [
    "check_sources",
    "output_triton",
    "plan_triton",
    "prepare_output_triton",
    "prepare_query_triton",
    "sparse_decode_triton",
    "sparse_prefill_triton",
]


@implements(plan)
def plan_triton(
    batch: BatchMetadata,
    geometry: CacheGeometry,
    prefill_layout: PrefillLayout,
    *,
    reuse: AttentionPlan | None = None,
) -> AttentionPlan:
    """See the contract."""
    return make_plan(batch, geometry, prefill_layout, reuse)


@implements(prepare_query)
def prepare_query_triton(plan: AttentionPlan, q_THD: Tensor, rope: RopeTable, *, eps: float) -> Tensor:
    """See the contract."""
    if rope.rope_width > q_THD.shape[-1]:
        raise ShapeError(f"a rotary table of {rope.rope_width} lanes for heads of {q_THD.shape[-1]}")
    return query_norm_rope(q_THD, plan.batch.positions_T, rope.cos_sin_PR, eps=eps)


def check_sources(
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
) -> None:
    """Checks what the sparse attention contracts promise to check.

    Raises:
        ShapeError: If widths or token counts differ, or only one of cache and rows is given.
    """
    if (compressed_cache is None) != (compressed_rows is None):
        raise ShapeError("compressed rows need both a cache and a selection; only one of the two was given")
    for cache, rows in ((window_cache, window_rows), (compressed_cache, compressed_rows)):
        if cache is not None and cache.layout.width != q_THD.shape[-1]:
            raise ShapeError(f"queries of {q_THD.shape[-1]} lanes against rows of {cache.layout.width}")
        if rows is not None and rows.slots_TK.shape[0] != q_THD.shape[0]:
            raise ShapeError(f"{q_THD.shape[0]} queries but {rows.slots_TK.shape[0]} row selections")


def _selected(cache: CacheHandle, rows: RowSelection) -> SelectedRows:
    rows = whole_rows(rows)
    return SelectedRows(cache.pages, cache.layout, rows.slots_TK, rows.lengths_T)


def _attend(
    q_THD: Tensor,
    window: tuple[CacheHandle, RowSelection],
    compressed: tuple[CacheHandle | None, RowSelection | None],
    sink_H: Tensor,
    scale: float,
    *,
    divided: bool,
) -> AttentionOutput:
    check_sources(q_THD, *window, *compressed)
    cache, rows = compressed
    selected = _selected(*window)
    other = None if cache is None or rows is None else _selected(cache, rows)
    num_tokens, num_heads, _ = q_THD.shape
    target = target_of(q_THD.device)
    tiles = attention_tiles(target, num_heads, q_THD.dtype)
    entries = selected.slots_TK.shape[1] + (0 if other is None else other.slots_TK.shape[1])
    splits = 1
    if divided:
        splits = num_attention_splits(
            target, tiles, num_tokens=num_tokens, num_heads=num_heads, num_entries=entries, batch_invariant=False
        )
    out_THD, lse_TH = sparse_attention(q_THD, selected, other, sink_H, scale=scale, tiles=tiles, num_splits=splits)
    return AttentionOutput(out_THD, lse_TH)


@implements(sparse_decode)
def sparse_decode_triton(
    plan: AttentionPlan,
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
    sink_H: Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    """See the contract."""
    window, compressed = (window_cache, window_rows), (compressed_cache, compressed_rows)
    return _attend(q_THD, window, compressed, sink_H, scale, divided=True)


@implements(sparse_prefill)
def sparse_prefill_triton(
    plan: AttentionPlan,
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
    sink_H: Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    """See the contract."""
    window, compressed = (window_cache, window_rows), (compressed_cache, compressed_rows)
    return _attend(q_THD, window, compressed, sink_H, scale, divided=False)


@implements(prepare_linear)
def prepare_output_triton(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract."""
    return prepare_weight(weight, activation=activation)


@implements(output)
def output_triton(
    plan: AttentionPlan, out_THD: Tensor, rope: RopeTable, wo_a: PreparedWeight, *, num_groups: int
) -> Tensor:
    """See the contract. The input stays in the compute type."""
    assert isinstance(wo_a, TritonWeight)
    _, num_heads, width = out_THD.shape
    if num_heads % num_groups or wo_a.shape[1] != num_heads // num_groups * width or wo_a.shape[0] % num_groups:
        raise ShapeError(f"{num_heads} heads of {width} in {num_groups} groups against wo_a of shape {wo_a.shape}")
    return project_outputs(
        out_THD,
        plan.batch.positions_T,
        rope.cos_sin_PR,
        stored_matrices(wo_a, num_groups),
        rounds_input=False,
        target=target_of(out_THD.device),
        batch_invariant=False,
    )
