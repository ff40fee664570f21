"""Sparse attention by the portable tilelang kernels. Shapes as in `halocline.hal.ops.attention`."""

from __future__ import annotations

from torch import Tensor

from halocline.backends_triton.attention_triton import check_sources
from halocline.backends_triton.row_widths import whole_rows
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionOutput, AttentionPlan, RowSelection, sparse_decode, sparse_prefill
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.kernels_portable import sparse_attention as triton_kernel
from halocline.kernels_portable import tilelang_sparse_attention as kernel
from halocline.kernels_portable.target import target_of

__all__ = ["sparse_decode_tilelang", "sparse_prefill_tilelang"]

_STEP = 32  # rows of a step at least, for the number of parts


def _selected(cache: CacheHandle, rows: RowSelection) -> triton_kernel.SelectedRows:
    rows = whole_rows(rows)
    return triton_kernel.SelectedRows(cache.pages, cache.layout, rows.slots_TK, rows.lengths_T)


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
    tiles = kernel.attention_tiles(target, num_heads)
    splits = 1
    if divided:
        entries = selected.slots_TK.shape[1] + (0 if other is None else other.slots_TK.shape[1])
        sizes = triton_kernel.AttentionTiles(heads=tiles.heads, rows=max(tiles.rows, _STEP), num_warps=4, num_stages=1)
        splits = triton_kernel.num_attention_splits(
            target, sizes, num_tokens=num_tokens, num_heads=num_heads, num_entries=entries, batch_invariant=False
        )
    out_THD, lse_TH = kernel.sparse_attention_tilelang(
        q_THD, selected, other, sink_H, scale=scale, tiles=tiles, num_splits=splits
    )
    return AttentionOutput(out_THD, lse_TH)


@implements(sparse_decode)
def sparse_decode_tilelang(
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
def sparse_prefill_tilelang(
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
