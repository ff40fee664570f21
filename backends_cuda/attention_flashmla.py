"""Sparse attention by FlashMLA. Shapes as in `halocline.hal.ops.attention`.

Decode reads paged FP8 rows. Its schedule depends on the lengths' values, so one is made in each step for each class
of layers, by a kernel of ours. Prefill reads bfloat16 rows that are gathered first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halocline.backends_cuda.flash_mla_library import flash_mla, flash_mla_pages, num_schedule_parts, pad_heads
from halocline.backends_triton.attention_triton import check_sources
from halocline.backends_triton.prefill_workspace import gather_rows, workspace_rows
from halocline.backends_triton.row_widths import padded_rows
from halocline.backends_triton.step_state import once_per_step
from halocline.hal.op import implements
from halocline.hal.ops.attention import (
    AttentionOutput,
    AttentionPlan,
    RowSelection,
    sparse_decode,
    sparse_prefill,
)
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.kernels_portable.split_schedule import split_schedule

__all__ = ["sparse_decode_flashmla", "sparse_prefill_flashmla"]

_OWNER = "flashmla"
_DECODE_MULTIPLE = 64  # entries of an index row
_PREFILL_MULTIPLE = 128
_MOST_WORKSPACE_ROWS = 1 << 20  # 1 GiB; longer contexts read pages instead


def _nothing(q_THD: Tensor) -> AttentionOutput:
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    return AttentionOutput(torch.empty_like(q_THD), lse_TH)


@implements(sparse_decode)
def sparse_decode_flashmla(
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
    check_sources(q_THD, window_cache, window_rows, compressed_cache, compressed_rows)
    num_tokens, num_heads, width = q_THD.shape
    if not num_tokens:
        return _nothing(q_THD)
    library = flash_mla()
    q_THD, sink_H = pad_heads(q_THD, sink_H)
    first_token = window_rows.lengths_T.storage_offset()
    window = padded_rows(window_rows, _DECODE_MULTIPLE)
    lengths_T, other_lengths_T = window.lengths_T.contiguous(), None
    extra: dict[str, Tensor] = {}
    shape_class: tuple[int, ...] = (window_cache.layout.page_rows, window.slots_TK.shape[1])
    if compressed_cache is not None and compressed_rows is not None:
        rows = padded_rows(compressed_rows, _DECODE_MULTIPLE)
        other_lengths_T = rows.lengths_T.contiguous()
        extra = {
            "extra_k_cache": flash_mla_pages(compressed_cache),
            "extra_indices_in_kvcache": rows.slots_TK[:, None],
            "extra_topk_length": other_lengths_T,
        }
        shape_class += (compressed_cache.layout.page_rows, rows.slots_TK.shape[1])

    def new_schedule() -> object:
        schedule: Any = library.new_schedule()
        num_parts = num_schedule_parts(q_THD.shape[1], q_THD.device)
        if num_parts:
            found = split_schedule(lengths_T, other_lengths_T, num_parts=num_parts)
            schedule.tile_scheduler_metadata, schedule.num_splits = found
        return schedule

    key = (first_token, num_tokens, q_THD.shape[1], *shape_class)
    out, lse = library.decode(
        q_THD[:, None],
        flash_mla_pages(window_cache),
        None,
        None,
        width,
        once_per_step(plan, _OWNER, key, new_schedule),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=window.slots_TK[:, None],
        attn_sink=sink_H,
        topk_length=lengths_T,
        **extra,
        **library.options,
    )
    return AttentionOutput(out[:, 0, :num_heads], lse[:, :num_heads, 0])


@implements(sparse_prefill)
def sparse_prefill_flashmla(
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
    """See the contract. Contexts whose rows would not fit the workspace are read through their pages, as in decode."""
    check_sources(q_THD, window_cache, window_rows, compressed_cache, compressed_rows)
    num_tokens, num_heads, width = q_THD.shape
    if not num_tokens:
        return _nothing(q_THD)
    sources = [(window_cache, window_rows, workspace_rows(plan, window_cache, plan.geometry.window_page_rows))]
    if compressed_cache is not None and compressed_rows is not None:
        rows = workspace_rows(plan, compressed_cache, plan.geometry.page_tokens)
        sources.insert(0, (compressed_cache, compressed_rows, rows))
    total = sum(count for *_, count in sources)
    if total > _MOST_WORKSPACE_ROWS:
        return sparse_decode_flashmla(
            plan, q_THD, window_cache, window_rows, compressed_cache, compressed_rows, sink_H, scale=scale
        )
    library = flash_mla()
    q_THD, sink_H = pad_heads(q_THD, sink_H)
    workspace_ND = torch.empty((total, width), dtype=torch.bfloat16, device=q_THD.device)
    parts, first = [], 0
    for cache, rows_of_cache, count in sources:
        parts.append(gather_rows(cache, rows_of_cache, workspace_ND, first, count))
        first += count
    joined_TK = torch.cat(parts, dim=1)
    missing = -joined_TK.shape[1] % _PREFILL_MULTIPLE
    joined_TK = torch.nn.functional.pad(joined_TK, (0, missing), value=-1)
    out_THD, _, lse_TH = library.prefill(
        q_THD, workspace_ND[:, None], joined_TK[:, None], scale, width, attn_sink=sink_H, **library.options
    )
    unseen_T = (joined_TK < 0).all(dim=1)[:, None]
    out_THD = out_THD[:, :num_heads].masked_fill(unseen_T[..., None], 0.0)
    lse_TH = (lse_TH[:, :num_heads] * library.prefill_lse_unit).masked_fill(unseen_T, torch.inf)
    return AttentionOutput(out_THD, lse_TH)
