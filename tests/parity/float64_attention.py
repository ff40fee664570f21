"""Attention, cache, compressor and indexer from their formulas, one token at a time, in float64 and whole numbers.

T tokens, H heads, D head width, K rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from float64_dense import Matrix, _tensor
from float64_numbers import (
    Array,
    e2m1_codes,
    numbers,
    power_of_two_above,
    read_row,
    rotate,
    rounded,
    walsh_hadamard,
    write_row,
)

from halocline.hal.ops.attention import AttentionOutput, AttentionPlan, RowSelection
from halocline.hal.ops.compressor import CompressorState
from halocline.hal.ops.indexer import IndexQuery
from halocline.hal.ops.kv_cache import CacheHandle


def _slot(pages: torch.Tensor, request: int, row: int, unit: int) -> int:
    """Cache slot of a request's row; -1 where its page is not there."""
    if request < 0 or row < 0 or row // unit >= pages.shape[1]:
        return -1
    page = int(pages[request, row // unit])
    return page * unit + row % unit if page >= 0 else -1


def _tokens(plan: AttentionPlan) -> list[tuple[int, int, int]]:
    """(token, position, request) of every real token."""
    pairs = zip(plan.batch.positions_T.tolist(), plan.batch.token_requests_T.tolist(), strict=True)
    return [(token, position, request) for token, (position, request) in enumerate(pairs) if position >= 0]


# ---- plan -----------------------------------------------------------------------------------------------------


def plan_float64(
    batch: Any, geometry: Any, prefill_layout: Any, *, reuse: AttentionPlan | None = None
) -> AttentionPlan:
    num_tokens = batch.positions_T.shape[0]
    own = torch.full((num_tokens,), -1)
    window_TW = torch.full((num_tokens, geometry.window), -1, dtype=torch.int32)
    lengths_T = torch.zeros(num_tokens, dtype=torch.int32)
    visible = {ratio: torch.zeros(num_tokens, dtype=torch.int32) for ratio in geometry.ratios}
    entries = torch.full((num_tokens, max(batch.max_seqlen // 128, 1)), -1, dtype=torch.int32)
    pairs = zip(batch.positions_T.tolist(), batch.token_requests_T.tolist(), strict=True)
    for token, (position, request) in enumerate(pairs):
        if position < 0:
            continue
        own[token] = _slot(batch.window_pages_RP, request, position, geometry.window_page_rows)
        seen = range(max(0, position - geometry.window + 1), position + 1)
        for column, row in enumerate(seen):
            window_TW[token, column] = _slot(batch.window_pages_RP, request, row, geometry.window_page_rows)
        lengths_T[token] = len(seen)
        for ratio in geometry.ratios:
            visible[ratio][token] = (position + 1) // ratio
        for entry in range((position + 1) // 128):
            entries[token, entry] = _slot(batch.token_pages_RP, request, entry, geometry.page_tokens // 128)
    if reuse is not None:
        reuse.batch = batch
        for old, new in ((reuse.window_slot_mapping_T, own), (reuse.window_rows.slots_TK, window_TW)):
            old.copy_(new)
        reuse.window_rows.lengths_T.copy_(lengths_T)
        for ratio, counts in visible.items():
            reuse.visible[ratio].copy_(counts)
        reuse.all_rows[128] = RowSelection(entries, reuse.visible[128])
        return reuse
    return AttentionPlan(
        batch=batch,
        geometry=geometry,
        prefill_layout=prefill_layout,
        window_slot_mapping_T=own,
        window_rows=RowSelection(window_TW, lengths_T),
        visible=visible,
        all_rows={128: RowSelection(entries, visible[128])},
    )


# ---- attention ------------------------------------------------------------------------------------------------


def prepare_query_float64(plan: AttentionPlan, q_THD: torch.Tensor, rope: Any, *, eps: float) -> torch.Tensor:
    q, out = numbers(q_THD), np.zeros(tuple(q_THD.shape))
    for token, position, _ in _tokens(plan):
        normed = q[token] / np.sqrt((q[token] ** 2).mean(-1, keepdims=True) + eps)
        out[token] = rotate(normed, rope.cos_sin_PR, position)
    return _tensor(out, q_THD.dtype)


def sparse_float64(
    plan: AttentionPlan,
    q_THD: torch.Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
    sink_H: torch.Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    sources = [(window_cache, window_rows)]
    if compressed_cache is not None and compressed_rows is not None:
        sources.append((compressed_cache, compressed_rows))
    q, sinks = numbers(q_THD), numbers(sink_H)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], np.inf)
    for token in range(len(q)):
        rows = [
            read_row(cache, slot)
            for cache, selection in sources
            for slot in selection.slots_TK[token, : int(selection.lengths_T[token])].tolist()
            if slot >= 0
        ]
        if not rows:
            continue
        stacked = np.array(rows)
        scores = q[token] @ stacked.T * scale
        lse[token] = np.logaddexp.reduce(scores, axis=1)
        shares = np.exp(scores - np.logaddexp(lse[token], sinks)[:, None])
        out[token] = shares @ stacked
    return AttentionOutput(_tensor(out, q_THD.dtype), _tensor(lse, torch.float32))


def output_float64(
    plan: AttentionPlan, out_THD: torch.Tensor, rope: Any, wo_a: Matrix, *, num_groups: int
) -> torch.Tensor:
    rows, matrices = numbers(out_THD), wo_a.values.reshape(num_groups, -1, wo_a.shape[1])
    result = np.zeros((len(rows), wo_a.shape[0]))
    for token, position, _ in _tokens(plan):
        back = rounded(rotate(rows[token], rope.cos_sin_PR, position, back=True), out_THD.dtype)
        groups = back.reshape(num_groups, -1)
        result[token] = np.concatenate([matrix @ lanes for matrix, lanes in zip(matrices, groups, strict=True)])
    return _tensor(result, out_THD.dtype)


# ---- cache ----------------------------------------------------------------------------------------------------


def allocate_float64(layout: Any, num_pages: int, *, device: str) -> CacheHandle:
    pages = torch.zeros(num_pages, layout.page_stride, dtype=torch.uint8)
    return CacheHandle(layout=layout, num_pages=num_pages, pages=pages)


def read_rows_float64(cache: CacheHandle, slots_N: torch.Tensor) -> torch.Tensor:
    rows = [np.zeros(cache.layout.width) if slot < 0 else read_row(cache, slot) for slot in slots_N.tolist()]
    return _tensor(np.array(rows).reshape(len(rows), cache.layout.width), torch.float32)


def write_rows_float64(cache: CacheHandle, slots_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
    for slot, row in zip(slots_N.tolist(), numbers(rows_ND), strict=True):
        if slot >= 0:
            write_row(cache, slot, row)


def _norm(lanes: Array, gain: Array, eps: float) -> Array:
    return lanes / np.sqrt((lanes * lanes).mean() + eps) * gain


def insert_window_float64(
    plan: AttentionPlan, kv_TD: torch.Tensor, norm_weight_D: torch.Tensor, rope: Any, cache: CacheHandle, *, eps: float
) -> None:
    kv, gain = numbers(kv_TD), numbers(norm_weight_D)
    for token, position, request in _tokens(plan):
        latent = rotate(_norm(kv[token], gain, eps), rope.cos_sin_PR, position)
        slot = _slot(plan.batch.window_pages_RP, request, position, plan.geometry.window_page_rows)
        write_row(cache, slot, rounded(latent, kv_TD.dtype))


# ---- compressor -----------------------------------------------------------------------------------------------


def allocate_state_float64(num_slots: int, lanes: int, *, ratio: int, extra_rows: int, device: str) -> CompressorState:
    ring = {4: 8, 128: 128}[ratio] + extra_rows
    return CompressorState(rows_SB2C=torch.zeros(num_slots, ring, 2, lanes), ratio=ratio)


def insert_float64(
    plan: AttentionPlan,
    values_TC: torch.Tensor,
    scores_TC: torch.Tensor,
    position_bias_RC: torch.Tensor,
    norm_weight_D: torch.Tensor,
    rope: Any,
    state: CompressorState,
    cache: CacheHandle,
    *,
    eps: float,
) -> None:
    """Feeds token after token into the ring; a token that closes a block pools what stands in it."""
    ratio, width, gain = state.ratio, cache.layout.width, numbers(norm_weight_D)
    ring = state.rows_SB2C.shape[1]
    compute = torch.float32 if cache.layout.format.value == "float32" else torch.bfloat16
    for token, position, request in _tokens(plan):
        slot = int(plan.batch.state_slots_R[request])
        state.rows_SB2C[slot, position % ring, 0] = values_TC[token]
        state.rows_SB2C[slot, position % ring, 1] = scores_TC[token] + position_bias_RC[position % ratio]
        if (position + 1) % ratio:
            continue
        entry, first = position // ratio, position + 1 - ratio
        pool = [(at, slice(-width, None)) for at in range(first, position + 1)]
        if ratio == 4 and entry > 0:
            pool += [(at, slice(0, width)) for at in range(first - 4, first)]
        values = np.array([numbers(state.rows_SB2C[slot, at % ring, 0])[lanes] for at, lanes in pool])
        scores = np.array([numbers(state.rows_SB2C[slot, at % ring, 1])[lanes] for at, lanes in pool])
        shares = np.exp(scores - scores.max(0))
        pooled = rounded((shares * values).sum(0) / shares.sum(0), compute)
        lanes = rounded(rotate(_norm(pooled, gain, eps), rope.cos_sin_PR, entry * ratio), compute)
        if cache.layout.kind == "index_key":
            lanes = rounded(walsh_hadamard(width) @ lanes, compute)
        write_row(cache, _slot(plan.batch.token_pages_RP, request, entry, cache.layout.page_rows), lanes)


# ---- indexer --------------------------------------------------------------------------------------------------


def prepare_index_query_float64(
    plan: AttentionPlan, q_THI: torch.Tensor, weights_TH: torch.Tensor, rope: Any, *, rounding: str
) -> IndexQuery:
    q, (num_tokens, heads, width) = numbers(q_THI), q_THI.shape
    out = np.zeros((num_tokens, heads, width))
    transform = walsh_hadamard(width)
    for token, position, _ in _tokens(plan):
        for head in range(heads):
            lanes = rotate(q[token, head], rope.cos_sin_PR, position)
            if rounding == "none":
                out[token, head] = transform @ lanes
                continue
            lanes = rounded(transform @ rounded(lanes, torch.bfloat16), torch.bfloat16)
            out[token, head] = _round_index_query(lanes, rounding)
    weights = numbers(weights_TH) / np.sqrt(width) / np.sqrt(heads)
    return IndexQuery(_tensor(out, torch.float32), _tensor(weights, torch.float32))


def _round_index_query(lanes: Array, rounding: str) -> Array:
    import ml_dtypes
    from float64_numbers import E2M1

    if rounding == "fp8_row":
        scale = max(np.abs(lanes).max(), 1e-8) / 448
        return (lanes / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    groups = lanes.reshape(-1, 32)
    scales = np.array([power_of_two_above(max(np.abs(group).max(), 6 * 2.0**-126) / 6) for group in groups])
    return (E2M1[e2m1_codes(groups / scales[:, None])] * scales[:, None]).reshape(-1)


def logits_float64(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> torch.Tensor:
    q, weights = numbers(query.q_THI), numbers(query.weights_TH)
    out = np.full((len(q), max(plan.batch.max_seqlen // 4, 1)), np.nan)
    for token, position, request in _tokens(plan):
        if not first_token <= token < first_token + len(q):
            continue
        at = token - first_token
        closed = range((position + 1) // 4)
        slots = [_slot(plan.batch.token_pages_RP, request, entry, cache.layout.page_rows) for entry in closed]
        if slots:
            keys = np.array([read_row(cache, slot) for slot in slots])
            out[at, : len(slots)] = weights[at] @ np.maximum(q[at] @ keys.T, 0)
    return _tensor(out, torch.float32)


def select_float64(
    plan: AttentionPlan, logits_TS: torch.Tensor, *, first_token: int, num_kept: int, page_rows: int
) -> RowSelection:
    slots_TK = torch.full((logits_TS.shape[0], num_kept), -1, dtype=torch.int32)
    lengths_T = torch.zeros(logits_TS.shape[0], dtype=torch.int32)
    for token, position, request in _tokens(plan):
        at = token - first_token
        if not 0 <= at < logits_TS.shape[0]:
            continue
        scores = logits_TS[at, : (position + 1) // 4].tolist()
        best = sorted(range(len(scores)), key=lambda entry: -scores[entry])[:num_kept]
        for column, entry in enumerate(best):
            slots_TK[at, column] = _slot(plan.batch.token_pages_RP, request, entry, page_rows)
        lengths_T[at] = len(best)
    return RowSelection(slots_TK, lengths_T)
