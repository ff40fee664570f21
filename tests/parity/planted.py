"""Kernels with one fault each, as they have been seen in the wild. The rest is the reference's own work."""

from __future__ import annotations

from typing import Any

import torch

from halocline.backends_reference import attention, compressor, gemm, indexer, kv_cache, moe, norm
from halocline.hal.errors import ShapeError
from halocline.hal.ops.attention import AttentionOutput, RowSelection
from halocline.hal.ops.moe import Routing


def one_sink_dropped(plan: Any, q_THD: Any, *rest: Any, scale: float) -> AttentionOutput:
    """The last head forgets its sink."""
    *caches, sink_H = rest
    sink_H = sink_H.clone()
    sink_H[-1] = -torch.inf
    return attention.sparse_decode_reference(plan, q_THD, *caches, sink_H, scale=scale)


def scale_halved(plan: Any, q_THD: Any, *rest: Any, scale: float) -> AttentionOutput:
    return attention.sparse_decode_reference(plan, q_THD, *rest, scale=scale / 2)


def length_ignored(plan: Any, q_THD: Any, *rest: Any, scale: float) -> AttentionOutput:
    """Window rows behind the length are read too."""
    window_cache, rows, *others = rest
    usable_TK = rows.slots_TK.clamp_max(window_cache.num_pages * window_cache.layout.page_rows - 1)
    rows = RowSelection(usable_TK, torch.full_like(rows.lengths_T, rows.slots_TK.shape[1]))
    return attention.sparse_decode_reference(plan, q_THD, window_cache, rows, *others, scale=scale)


def zero_times_nan(plan: Any, q_THD: Any, *rest: Any, scale: float) -> AttentionOutput:
    """Holes are read from slot 0 and multiplied by a probability of zero, which NaN survives."""
    result = attention.sparse_decode_reference(plan, q_THD, *rest, scale=scale)
    window_cache, rows = rest[:2]
    has_hole_T = (rows.slots_TK < 0).any(1)
    first_D = kv_cache.read_rows_reference(window_cache, torch.zeros(1, dtype=torch.int64))[0]
    return AttentionOutput(result.out_THD + 0 * first_D * has_hole_T[:, None, None], result.lse_TH)


def last_rows_unwritten(plan: Any, q_THD: Any, *rest: Any, scale: float) -> AttentionOutput:
    """The second half of the heads is left as the allocator gave it."""
    result = attention.sparse_decode_reference(plan, q_THD, *rest, scale=scale)
    out_THD = torch.empty_like(result.out_THD).fill_(torch.nan)
    half = max(out_THD.shape[1] // 2, 1)
    out_THD[:, :half] = result.out_THD[:, :half]
    return AttentionOutput(out_THD, result.lse_TH)


def raises(plan: Any, q_THD: Any, *rest: Any, scale: float) -> AttentionOutput:
    raise RuntimeError("Unsupported h_q")


def refuses_many(plan: Any, q_THD: Any, *rest: Any, scale: float) -> AttentionOutput:
    """Right, but for one token at a time."""
    if q_THD.shape[0] > 1:
        raise ShapeError(f"{q_THD.shape[0]} tokens: one is needed")
    return attention.sparse_decode_reference(plan, q_THD, *rest, scale=scale)


def topk_shifted(plan: Any, logits_TS: Any, **options: Any) -> RowSelection:
    """Scores move by one entry."""
    return indexer.select_reference(plan, logits_TS.roll(1, dims=1), **options)


def negative_heads_counted(plan: Any, query: Any, cache: Any, *, first_token: int) -> torch.Tensor:
    """Without the ReLU, by scoring the mirrored query as well."""
    mirrored = query._replace(q_THI=-query.q_THI.float())
    return indexer.logits_reference(plan, query, cache, first_token=first_token) - indexer.logits_reference(
        plan, mirrored, cache, first_token=first_token
    )


def sigmoid_scores(logits_TE: Any, bias_E: Any, *, num_chosen: int, scale: float) -> Routing:
    scores_TE = torch.sigmoid(logits_TE)
    ids_TK = (scores_TE + bias_E).topk(num_chosen, dim=-1).indices
    chosen_TK = scores_TE.gather(1, ids_TK)
    return Routing(ids_TK.int(), chosen_TK / chosen_TK.sum(-1, keepdim=True) * scale)


def gate_clamped_below(gate_up_TI2: Any, *, limit: float) -> torch.Tensor:
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    gate = gate.clamp(-limit, limit) if limit else gate
    return moe.swiglu_reference(torch.cat((gate, up), dim=-1), limit=limit)


def weight_after_down(x_TD: Any, routing: Any, weights: Any, *, limit: float) -> torch.Tensor:
    """Each routing weight is applied once more."""
    return moe.experts_reference(x_TD, Routing(routing.ids_TK, routing.weights_TK.square()), weights, limit=limit)


def last_token_of_seventeen_lost(x_TD: Any, routing: Any, weights: Any, *, limit: float) -> torch.Tensor:
    """Right at every token count but one."""
    result = moe.experts_reference(x_TD, routing, weights, limit=limit)
    if len(result) == 17:
        result[-1] = 0
    return result


def padding_stored(plan: Any, kv_TD: Any, norm_weight_D: Any, rope: Any, cache: Any, *, eps: float) -> None:
    """A slot of -1 is taken for the last one of the cache."""
    kv_cache.insert_window_reference(plan, kv_TD, norm_weight_D, rope, cache, eps=eps)
    last = torch.tensor([cache.num_pages * cache.layout.page_rows - 1])
    kv_cache.write_rows_reference(cache, last, torch.ones(1, cache.layout.width))


def rotated_by_index(*arguments: Any, eps: float) -> None:
    """Entries are rotated as if blocks were one position apart."""
    plan, values, scores, bias, gain, rope, state, cache = arguments
    ratio = state.ratio
    table = rope.cos_sin_PR[torch.arange(rope.num_positions) // ratio]
    compressor.insert_reference(plan, values, scores, bias, gain, type(rope)(cos_sin_PR=table), state, cache, eps=eps)


def gain_forgotten(x_TD: Any, weight_D: Any, *, eps: float) -> torch.Tensor:
    return norm.rms_norm_reference(x_TD, torch.ones_like(weight_D), eps=eps)


def refuses_everything(x_TD: Any, weight_D: Any, *, eps: float) -> torch.Tensor:
    raise ShapeError(f"{x_TD.shape[1]} lanes: none are known")


def input_rounded(x_TK: Any, weight: Any, *, out_dtype: Any = None) -> torch.Tensor:
    """Rounds the input to E4M3 although nobody asked."""
    return gemm.linear_reference(gemm.round_activation(x_TK.float()).to(x_TK.dtype), weight, out_dtype=out_dtype)


prepare_linear = gemm.prepare_linear_reference
prepare_experts = moe.prepare_experts_reference
