"""Reference sparse attention. Shapes as in `halocline.hal.ops.attention`.

Decode gathers each query's rows. Prefill takes the queries in blocks and reads each row of a block once: neighbours
see nearly the same rows, so one product over the union with a mask costs a fraction of gathering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halocline.backends_reference.gemm import ReferenceWeight
from halocline.backends_reference.kv_cache import read_rows_reference
from halocline.backends_reference.norm import root_mean_square_scale
from halocline.backends_reference.rope import rotate_tail
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import (
    AttentionOutput,
    AttentionPlan,
    RowSelection,
    output,
    prepare_query,
    sparse_decode,
    sparse_prefill,
)
from halocline.hal.ops.gemm import PreparedWeight
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["output_reference", "prepare_query_reference", "sparse_decode_reference", "sparse_prefill_reference"]

_DECODE_BLOCK = 64
_PREFILL_BLOCK = 128


@implements(prepare_query)
def prepare_query_reference(plan: AttentionPlan, q_THD: Tensor, rope: RopeTable, *, eps: float) -> Tensor:
    """See the contract."""
    normed_THD = q_THD.float() * root_mean_square_scale(q_THD, eps)
    return rotate_tail(normed_THD, rope, plan.batch.positions_T).to(q_THD.dtype)


def _softmax_with_sink(scores_THK: Tensor, visible_TK: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (the sink takes its share and gives no value) and log-sum-exp without the sink."""
    scores_THK = scores_THK.masked_fill(~visible_TK[:, None, :], -torch.inf)
    lse_TH = torch.logsumexp(scores_THK, dim=-1)
    lse_TH = lse_TH.masked_fill(~visible_TK.any(-1)[:, None], torch.inf)
    largest_TH = scores_THK.detach().amax(-1).clamp_min(torch.finfo(torch.float32).min)
    exponentials_THK = torch.exp(scores_THK - largest_TH[..., None])
    total_TH = exponentials_THK.sum(-1) + torch.exp(sink_H.float() - largest_TH)
    return exponentials_THK / total_TH[..., None], lse_TH


def _visible(rows: RowSelection) -> Tensor:
    inside_TK = torch.arange(rows.slots_TK.shape[1], device=rows.slots_TK.device) < rows.lengths_T[:, None]
    return inside_TK & (rows.slots_TK >= 0)


def _sources(
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
) -> list[tuple[CacheHandle, RowSelection]]:
    sources = [(window_cache, window_rows)]
    if (compressed_cache is None) != (compressed_rows is None):
        raise ShapeError("compressed rows need both a cache and a selection; only one of the two was given")
    if compressed_cache is not None and compressed_rows is not None:
        sources.append((compressed_cache, compressed_rows))
    for cache, rows in sources:
        if cache.layout.width != q_THD.shape[-1]:
            raise ShapeError(f"queries of {q_THD.shape[-1]} lanes against rows of {cache.layout.width}")
        if rows.slots_TK.shape[0] != q_THD.shape[0]:
            raise ShapeError(f"{q_THD.shape[0]} queries but {rows.slots_TK.shape[0]} row selections")
    return sources


def _blocks(num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_tokens, size):
        yield start, min(start + size, num_tokens)


@implements(sparse_decode)
def sparse_decode_reference(
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
    sources = _sources(q_THD, window_cache, window_rows, compressed_cache, compressed_rows)
    outs, lses = [q_THD[:0].float()], [q_THD.new_empty((0, q_THD.shape[1]), dtype=torch.float32)]
    for start, stop in _blocks(q_THD.shape[0], _DECODE_BLOCK):
        parts = [(cache, rows.rows(start, stop)) for cache, rows in sources]
        visible_TK = torch.cat([_visible(rows) for _, rows in parts], dim=1)
        slots = [rows.slots_TK.masked_fill(~_visible(rows), -1) for _, rows in parts]
        rows_TKD = torch.cat(
            [
                read_rows_reference(cache, s.flatten()).unflatten(0, s.shape)
                for (cache, _), s in zip(parts, slots, strict=True)
            ],
            dim=1,
        )
        scores_THK = torch.einsum("thd,tkd->thk", q_THD[start:stop].float(), rows_TKD) * scale
        probabilities_THK, lse_TH = _softmax_with_sink(scores_THK, visible_TK, sink_H)
        outs.append(torch.einsum("thk,tkd->thd", probabilities_THK, rows_TKD))
        lses.append(lse_TH)
    return AttentionOutput(torch.cat(outs).to(q_THD.dtype), torch.cat(lses))


@implements(sparse_prefill)
def sparse_prefill_reference(
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
    sources = _sources(q_THD, window_cache, window_rows, compressed_cache, compressed_rows)
    outs, lses = [q_THD[:0].float()], [q_THD.new_empty((0, q_THD.shape[1]), dtype=torch.float32)]
    for start, stop in _blocks(q_THD.shape[0], _PREFILL_BLOCK):
        values, masks = [], []
        for cache, rows in sources:
            union_U, mask_TU = _union(rows.rows(start, stop))
            values.append(read_rows_reference(cache, union_U))
            masks.append(mask_TU)
        values_UD, mask_TU = torch.cat(values), torch.cat(masks, dim=1)
        scores_THU = (q_THD[start:stop].float() @ values_UD.T) * scale
        probabilities_THU, lse_TH = _softmax_with_sink(scores_THU, mask_TU, sink_H)
        outs.append(probabilities_THU @ values_UD)
        lses.append(lse_TH)
    return AttentionOutput(torch.cat(outs).to(q_THD.dtype), torch.cat(lses))


def _union(rows: RowSelection) -> tuple[Tensor, Tensor]:
    """The distinct slots that a block of queries sees, and who sees which: (slots U, mask (T, U))."""
    visible_TK = _visible(rows)
    slots_TK = rows.slots_TK.long().masked_fill(~visible_TK, -1)
    union_U, places_TK = slots_TK.unique(return_inverse=True)
    mask_TU = torch.zeros((slots_TK.shape[0], union_U.shape[0]), dtype=torch.bool, device=slots_TK.device)
    mask_TU.scatter_(1, places_TK, True)
    return union_U, mask_TU & (union_U >= 0)


@implements(output)
def output_reference(
    plan: AttentionPlan, out_THD: Tensor, rope: RopeTable, wo_a: PreparedWeight, *, num_groups: int
) -> Tensor:
    """See the contract."""
    assert isinstance(wo_a, ReferenceWeight)
    num_tokens, num_heads, width = out_THD.shape
    if num_heads % num_groups or wo_a.shape[1] != num_heads // num_groups * width or wo_a.shape[0] % num_groups:
        raise ShapeError(f"{num_heads} heads of {width} in {num_groups} groups against wo_a of shape {wo_a.shape}")
    rotated_THD = rotate_tail(out_THD.float(), rope, plan.batch.positions_T, inverse=True).to(out_THD.dtype).float()
    groups_TGO = rotated_THD.view(num_tokens, num_groups, num_heads // num_groups * width)
    weights_GRO = wo_a.matrix_NK.view(num_groups, -1, groups_TGO.shape[-1])
    return torch.einsum("tgo,gro->tgr", groups_TGO, weights_GRO).flatten(1).to(out_THD.dtype)
