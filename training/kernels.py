"""Kernels of the training forward: whole rows of equal length, everything differentiable, no synchronisation.

They stand behind the same contracts as the reference kernels and compute the same function (a test compares them),
for the one batch that training knows: B rows of T tokens, all from position 0, one row a request. Caches keep rows as
(B, rows, lanes) tensors of the autograd graph. A `RowSelection` carries a boolean mask over a row's entries instead of
slots. The model's own code runs unchanged on top.

Shapes: B rows of a batch, T tokens of a row, W window, S entries of a row, H heads, D lanes, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from halocline.backends_reference import gemm as reference_gemm
from halocline.backends_reference import moe as reference_moe
from halocline.backends_reference.compressor import finish_entries
from halocline.backends_reference.gemm import ReferenceWeight, round_activation
from halocline.backends_reference.kv_cache import round_rows
from halocline.backends_reference.moe import ReferenceExperts, swiglu_reference
from halocline.backends_reference.norm import root_mean_square_scale
from halocline.backends_reference.rope import rotate_tail
from halocline.hal.formats import Weight
from halocline.hal.ops.attention import AttentionOutput, AttentionPlan, RowSelection
from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
from halocline.hal.ops.compressor import CompressorState
from halocline.hal.ops.indexer import IndexQuery
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.moe import PreparedExperts, Routing
from halocline.hal.ops.rope import RopeTable

__all__ = ["Observations", "Recorder", "row_plan", "training_kernels"]


@dataclass(eq=False, kw_only=True)
class Observations:
    """What a pass without gradients saw, one tensor for each layer in order, draft layers last.

    Attributes:
        log_sums: float32 (B * T, H) log-sum-exp of the attention scores without the sink.
        router_inputs: float32 (B * T, D) inputs of the routed experts.
    """

    log_sums: list[Tensor] = field(default_factory=list)
    router_inputs: list[Tensor] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class Recorder:
    """What a forward pass leaves for the losses and for the balance of experts.

    Attributes:
        sparse: Whether queries see the indexer's choice; otherwise they see every closed block (dense warm-up).
        sampled_T: Positions whose index scores are trained in this step.
        index_losses: One scalar for each ratio-4 layer.
        loads: For each score-routed layer, in order, how often each expert was chosen.
        seen: Where to leave what each layer sees, or None.
    """

    sparse: bool
    sampled_T: Tensor
    index_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    seen: Observations | None = None
    pending: tuple[IndexQuery, Tensor] | None = None


def row_plan(num_rows: int, length: int, geometry: CacheGeometry, *, device: str) -> AttentionPlan:
    """The plan of `num_rows` whole rows; only what the training kernels read is filled in."""
    positions_T = torch.arange(length, dtype=torch.int32, device=device).repeat(num_rows)
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * length
    nothing = torch.empty((num_rows, 0), dtype=torch.int32, device=device)
    batch = BatchMetadata(
        token_ids_T=torch.zeros_like(positions_T),
        positions_T=positions_T,
        token_requests_T=torch.arange(num_rows, device=device).repeat_interleave(length).int(),
        query_starts_R1=starts,
        seqlens_R=torch.full((num_rows,), length, dtype=torch.int32, device=device),
        state_slots_R=torch.arange(num_rows, dtype=torch.int32, device=device),
        window_pages_RP=nothing,
        token_pages_RP=nothing,
        num_tokens=num_rows * length,
        num_requests=num_rows,
        num_decode_tokens=0,
        num_decode_requests=0,
        max_seqlen=length,
    )
    visible = {ratio: (positions_T + 1) // ratio for ratio in geometry.ratios}
    masks = {ratio: _closed_blocks(length, ratio, num_rows, device) for ratio in geometry.ratios}
    return AttentionPlan(
        batch=batch,
        geometry=geometry,
        prefill_layout="ragged",
        window_slot_mapping_T=positions_T.long(),
        window_rows=RowSelection(positions_T[:, None], positions_T),
        visible=visible,
        all_rows={ratio: RowSelection(mask, visible[ratio]) for ratio, mask in masks.items()},
    )


def _closed_blocks(length: int, ratio: int, num_rows: int, device: str) -> Tensor:
    """(B * T, S) mask: entry j is visible at position t when j < (t + 1) // ratio."""
    positions = torch.arange(length, device=device)
    mask_TS = torch.arange(length // ratio, device=device)[None] < ((positions + 1) // ratio)[:, None]
    return mask_TS.repeat(num_rows, 1)


def training_kernels(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Replacements by op name; what is not named keeps its reference kernel."""

    def select(
        plan: AttentionPlan, logits_TS: Tensor, *, first_token: int, num_kept: int, page_rows: int
    ) -> RowSelection:
        return _select(plan, logits_TS, num_kept, recorder.sparse)

    def logits(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> Tensor:
        recorder.pending = (query, cache.pages)
        return _index_logits(plan, query, cache.pages) if recorder.sparse else plan.visible[4][:, None].float()

    def attend(
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
        entries_BSD = None if compressed_cache is None else compressed_cache.pages
        mask_TS = None if compressed_rows is None else compressed_rows.slots_TK
        pending, recorder.pending = recorder.pending, None
        out_BTHD, shares_BTS = _attend(
            plan, q_THD, window_cache.pages, entries_BSD, mask_TS, sink_H, scale, recorder.seen
        )
        if pending is not None:
            recorder.index_losses.append(_index_loss(plan, pending, shares_BTS, recorder.sampled_T))
        return AttentionOutput(out_BTHD.flatten(0, 1), None)

    def route_by_score(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
        routing = reference_moe.route_by_score_reference(logits_TE, bias_E, num_chosen=num_chosen, scale=scale)
        recorder.loads.append(_loads(routing, logits_TE.shape[1]))
        return routing

    def experts(x_TD: Tensor, routing: Routing, weights: PreparedExperts, *, limit: float) -> Tensor:
        if recorder.seen is not None:
            recorder.seen.router_inputs.append(x_TD.detach().float())
        return _experts(x_TD, routing, weights, limit=limit)

    return {
        "attention.sparse_prefill": attend,
        "indexer.logits": logits,
        "indexer.select": select,
        "moe.route_by_score": route_by_score,
        "moe.prepare_experts": _prepare_experts,
        "moe.experts": experts,
        "gemm.prepare_linear": _prepare_linear,
        "compressor.insert": _insert_entries,
        "kv_cache.insert_window": _insert_window,
    }


def _loads(routing: Routing, num_experts: int) -> Tensor:
    ones = torch.ones_like(routing.weights_TK).flatten()
    return ones.new_zeros(num_experts).index_add(0, routing.ids_TK.flatten().long(), ones)


def _prepare_linear(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> ReferenceWeight:
    """As the reference, but the weight is rounded already: what rounds its input is stated by `activation` alone."""
    return ReferenceWeight(matrix_NK=reference_gemm.dequantize(weight), rounds_input=activation != "none")


def _prepare_experts(gate_up: Weight, down: Weight, *, activation: Literal["none", "fp8_group128"]) -> ReferenceExperts:
    return ReferenceExperts(gate_up_E2ID=gate_up.data, down_EDI=down.data, rounds_input=activation != "none")


def _experts(x_TD: Tensor, routing: Routing, weights: PreparedExperts, *, limit: float) -> Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen: two products and no synchronisation."""
    assert isinstance(weights, ReferenceExperts)
    num_experts, two_i, width = weights.gate_up_E2ID.shape
    x = round_activation(x_TD.float()) if weights.rounds_input else x_TD.float()
    gate_up_TE2I = (x @ weights.gate_up_E2ID.reshape(-1, width).T).unflatten(-1, (num_experts, two_i))
    shares_TE = x.new_zeros((x.shape[0], num_experts)).scatter(1, routing.ids_TK.long(), routing.weights_TK)
    u_TEI = (swiglu_reference(gate_up_TE2I, limit=limit) * shares_TE[..., None]).to(x_TD.dtype).float()
    if weights.rounds_input:
        u_TEI = round_activation(u_TEI)
    down_TD: Tensor = u_TEI.flatten(1) @ weights.down_EDI.permute(0, 2, 1).flatten(0, 1)
    return down_TD.to(x_TD.dtype)


def _by_row(plan: AttentionPlan, x: Tensor) -> Tensor:
    by_row: Tensor = x.unflatten(0, (plan.batch.num_requests, -1))
    return by_row


def _insert_window(
    plan: AttentionPlan, kv_TD: Tensor, norm_weight_D: Tensor, rope: RopeTable, cache: CacheHandle, *, eps: float
) -> None:
    normed_TD = kv_TD.float() * root_mean_square_scale(kv_TD, eps) * norm_weight_D.float()
    latent_TD = rotate_tail(normed_TD, rope, plan.batch.positions_T).to(kv_TD.dtype)
    cache.pages = _by_row(plan, round_rows(cache.layout, latent_TD))


def _insert_entries(
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
    ratio = state.ratio
    values_BSrC = _by_row(plan, values_TC).unflatten(1, (-1, ratio))
    scores_BSrC = _by_row(plan, scores_TC).unflatten(1, (-1, ratio)) + position_bias_RC
    if ratio == 4:
        values_BSrC = _overlap(values_BSrC, 0.0)
        scores_BSrC = _overlap(scores_BSrC, -torch.inf)
    pooled_BSD = (torch.softmax(scores_BSrC, dim=2) * values_BSrC).sum(2)
    num_rows, num_entries = pooled_BSD.shape[:2]
    positions_N = (torch.arange(num_entries, device=pooled_BSD.device) * ratio).repeat(num_rows)
    entries_ND = finish_entries(pooled_BSD.flatten(0, 1), norm_weight_D, rope, positions_N, cache, eps)
    cache.pages = _by_row(plan, round_rows(cache.layout, entries_ND))


def _overlap(blocks_BSrC: Tensor, filler: float) -> Tensor:
    """Rows of the previous block in their first half of lanes, then of this block in their second half."""
    first, second = blocks_BSrC.chunk(2, dim=-1)
    previous = pad(first[:, :-1], (0, 0, 0, 0, 1, 0), value=filler)
    return torch.cat((previous, second), dim=2)


def _index_scores(q_BTHI: Tensor, weights_BTH: Tensor, keys_BSI: Tensor) -> Tensor:
    products_BTHS = torch.einsum("bthi,bsi->bths", q_BTHI, keys_BSI)
    return torch.einsum("bths,bth->bts", torch.relu(products_BTHS), weights_BTH)


@torch.no_grad()
def _index_logits(plan: AttentionPlan, query: IndexQuery, keys_BSI: Tensor) -> Tensor:
    """Scores of every query, in slices of positions so that the products by head stay small."""
    q_BTHI, weights_BTH = _by_row(plan, query.q_THI), _by_row(plan, query.weights_TH)
    step = max(128, (1 << 28) // (q_BTHI.shape[0] * q_BTHI.shape[2] * keys_BSI.shape[1] * 4) // 128 * 128)
    slices = range(0, q_BTHI.shape[1], step)
    parts = [_index_scores(q_BTHI[:, t : t + step], weights_BTH[:, t : t + step], keys_BSI) for t in slices]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _select(plan: AttentionPlan, logits_TS: Tensor, num_kept: int, sparse: bool) -> RowSelection:
    visible_T = plan.visible[4]
    num_entries = plan.batch.max_seqlen // 4
    closed_TS = torch.arange(num_entries, device=visible_T.device)[None] < visible_T[:, None]
    if not sparse or num_entries <= num_kept:
        return RowSelection(closed_TS, visible_T)
    best_TK = logits_TS.masked_fill(~closed_TS, -torch.inf).topk(num_kept, dim=-1).indices
    chosen_TS = torch.zeros_like(closed_TS).scatter(1, best_TK, True)
    return RowSelection(chosen_TS & closed_TS, visible_T)


def _attend(
    plan: AttentionPlan,
    q_THD: Tensor,
    window_BTD: Tensor,
    entries_BSD: Tensor | None,
    mask_TS: Tensor | None,
    sink_H: Tensor,
    scale: float,
    seen: Observations | None,
) -> tuple[Tensor, Tensor]:
    """Attention in bands of W queries over 2 W window rows, and over entries under a mask.

    Returns:
        Output (B, T, H, D), and for each query the share of each entry, summed over heads and detached (B, T, S).
    """
    window = plan.geometry.window
    q_BTHD = _by_row(plan, q_THD.float())
    num_rows, length, num_heads, _ = q_BTHD.shape
    short = -length % window
    q_BNWHD = pad(q_BTHD, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, window))
    rows_BNWD = pad(window_BTD, (0, 0, window, short)).unflatten(1, (-1, window))
    keys_BNKD = torch.cat((rows_BNWD[:, :-1], rows_BNWD[:, 1:]), dim=2)
    near = torch.einsum("bnwhd,bnkd->bnwhk", q_BNWHD, keys_BNKD) * scale
    near = near.masked_fill(~_band(near.shape[1], window, near.device)[None, :, :, None], -torch.inf)
    scores = near.flatten(1, 2)[:, :length]
    if entries_BSD is not None and mask_TS is not None:
        far = torch.einsum("bthd,bsd->bths", q_BTHD, entries_BSD) * scale
        far = far.masked_fill(~_by_row(plan, mask_TS)[:, :, None], -torch.inf)
        scores = torch.cat((scores, far), dim=-1)
    if seen is not None:
        seen.log_sums.append(scores.detach().logsumexp(-1).flatten(0, 1))
    sinks = sink_H[:, None].expand(num_rows, length, num_heads, 1)
    shares = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    near_shares = pad(shares[..., : 2 * window], (0, 0, 0, 0, 0, short)).unflatten(1, (-1, window))
    out_BTHD = torch.einsum("bnwhk,bnkd->bnwhd", near_shares, keys_BNKD).flatten(1, 2)[:, :length]
    far_shares = shares[..., 2 * window :]
    if entries_BSD is not None:
        out_BTHD = out_BTHD + torch.einsum("bths,bsd->bthd", far_shares, entries_BSD)
    return out_BTHD.to(q_THD.dtype), far_shares.detach().sum(2)


def _band(num_bands: int, window: int, device: torch.device) -> Tensor:
    """(bands, W, 2 W) mask: band n holds queries n * W .. and keys (n - 1) * W ..; a key lies 0 to W - 1 back."""
    back = window + torch.arange(window, device=device)[:, None] - torch.arange(2 * window, device=device)[None]
    inside = (back >= 0) & (back < window)
    exists = (
        torch.arange(num_bands, device=device)[:, None] * window + torch.arange(2 * window, device=device) >= window
    )
    return inside[None] & exists[:, None]


def _index_loss(
    plan: AttentionPlan, pending: tuple[IndexQuery, Tensor], shares_BTS: Tensor, sampled_N: Tensor
) -> Tensor:
    """KL from the layer's own attention over entries to the softmax of index scores, at sampled positions."""
    query, keys_BSI = pending
    q_BNHI = _by_row(plan, query.q_THI)[:, sampled_N]
    weights_BNH = _by_row(plan, query.weights_TH)[:, sampled_N]
    scores_BNS = _index_scores(q_BNHI, weights_BNH, keys_BSI)
    closed_NS = torch.arange(keys_BSI.shape[1], device=sampled_N.device)[None] < ((sampled_N + 1) // 4)[:, None]
    predicted_BNS = torch.log_softmax(scores_BNS.masked_fill(~closed_NS, -1e9), dim=-1)
    shares_BNS = shares_BTS[:, sampled_N]
    mass_BN = shares_BNS.sum(-1)
    target_BNS = shares_BNS / mass_BN.clamp_min(1e-9)[..., None]
    divergence_BNS = target_BNS * (target_BNS.clamp_min(1e-9).log() - predicted_BNS)
    return (divergence_BNS.sum(-1) * mass_BN).sum() / mass_BN.sum().clamp_min(1e-9)
