"""Reference compressor. Shapes as in `halocline.hal.ops.compressor`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halocline.backends_reference.hadamard import hadamard_transform
from halocline.backends_reference.kv_cache import write_rows_reference
from halocline.backends_reference.norm import root_mean_square_scale
from halocline.backends_reference.plan import slots_of_positions
from halocline.backends_reference.rope import rotate_tail
from halocline.hal.errors import OutOfPagesError, ShapeError
from halocline.hal.formats import RowFormat
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.compressor import CompressorState, allocate_state, insert
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable

__all__ = ["allocate_state_reference", "finish_entries", "insert_reference"]


@implements(allocate_state)
def allocate_state_reference(
    num_slots: int, lanes: int, *, ratio: int, extra_rows: int, device: str
) -> CompressorState:
    """See the contract."""
    shape = (num_slots, (2 * ratio if ratio == 4 else ratio) + extra_rows, 2, lanes)
    try:
        return CompressorState(rows_SB2C=torch.zeros(shape, device=device), ratio=ratio)
    except RuntimeError as error:
        needed = 4 * math.prod(shape)
        raise OutOfPagesError(f"state of {num_slots} requests ({needed} bytes) does not fit on {device}") from error


@implements(insert)
def insert_reference(
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
    """See the contract."""
    ratio, width = state.ratio, cache.layout.width
    lanes = width * (2 if ratio == 4 else 1)
    if values_TC.shape[1:] != (lanes,) or position_bias_RC.shape != (ratio, lanes):
        raise ShapeError(
            f"values {tuple(values_TC.shape)} and bias {tuple(position_bias_RC.shape)} "
            f"for ratio {ratio} and entries of {width} lanes"
        )
    batch = plan.batch
    positions_T, requests_T = batch.positions_T.long(), batch.token_requests_T.long()
    scores_TC = scores_TC.float() + position_bias_RC.float()[positions_T.clamp_min(0) % ratio]
    closing_N = ((positions_T >= 0) & ((positions_T + 1) % ratio == 0)).nonzero()[:, 0]
    if closing_N.numel():
        pool = _pooled_rows(plan, values_TC.float(), scores_TC, state, closing_N)
        entries_N = positions_T[closing_N] // ratio
        slots_N = slots_of_positions(
            batch.token_pages_RP, requests_T[closing_N], entries_N[:, None], cache.layout.page_rows
        )[:, 0]
        rows_ND = finish_entries(pool, norm_weight_D, rope, entries_N * ratio, cache, eps)
        write_rows_reference(cache, slots_N, rows_ND)
    _remember(plan, values_TC.detach(), scores_TC.detach(), state)


def _pooled_rows(
    plan: AttentionPlan, values_TC: Tensor, scores_TC: Tensor, state: CompressorState, closing_N: Tensor
) -> Tensor:
    """Softmax over the rows of each closing block (two blocks, in halves, for ratio 4), lane by lane: (N, D)."""
    ratio, overlaps = state.ratio, state.ratio == 4
    span = 2 * ratio if overlaps else ratio
    back_S = torch.arange(1 - span, 1, device=closing_N.device)
    positions_NS = plan.batch.positions_T.long()[closing_N][:, None] + back_S
    values_NSC, scores_NSC = _rows_at(plan, values_TC, scores_TC, state, closing_N, positions_NS)
    scores_NSC = scores_NSC.masked_fill((positions_NS < 0)[..., None], -torch.inf)
    if overlaps:
        width = values_NSC.shape[-1] // 2
        values_NSC = torch.cat((values_NSC[:, :ratio, :width], values_NSC[:, ratio:, width:]), dim=1)
        scores_NSC = torch.cat((scores_NSC[:, :ratio, :width], scores_NSC[:, ratio:, width:]), dim=1)
    return (torch.softmax(scores_NSC, dim=1) * values_NSC).sum(1)


def _rows_at(
    plan: AttentionPlan,
    values_TC: Tensor,
    scores_TC: Tensor,
    state: CompressorState,
    closing_N: Tensor,
    positions_NS: Tensor,
) -> tuple[Tensor, Tensor]:
    """Values and scores of earlier positions: from this step where it fed them, from the state otherwise."""
    batch = plan.batch
    requests_N = batch.token_requests_T.long()[closing_N]
    back_NS = batch.positions_T.long()[closing_N][:, None] - positions_NS
    tokens_NS = closing_N[:, None] - back_NS
    here_NS = tokens_NS >= batch.query_starts_R1.long()[requests_N][:, None]
    ring = state.rows_SB2C.shape[1]
    slots_N1 = batch.state_slots_R.long()[requests_N][:, None]
    stored_NS2C = state.rows_SB2C[slots_N1, positions_NS.clamp_min(0) % ring]
    fed = tokens_NS.clamp_min(0)
    pick = here_NS[..., None]
    exists = (positions_NS >= 0)[..., None]
    values = torch.where(pick, values_TC[fed], stored_NS2C[:, :, 0])
    scores = torch.where(pick, scores_TC[fed], stored_NS2C[:, :, 1])
    return values.masked_fill(~exists, 0.0), scores.masked_fill(~exists, 0.0)


def finish_entries(
    pooled_ND: Tensor, norm_weight_D: Tensor, rope: RopeTable, positions_N: Tensor, cache: CacheHandle, eps: float
) -> Tensor:
    """Norm, rotation and, for index keys, the Walsh-Hadamard transform; the row format rounds when it stores."""
    compute = torch.float32 if cache.layout.format is RowFormat.FLOAT32 else torch.bfloat16
    entry = pooled_ND.to(compute).float()
    entry = entry * root_mean_square_scale(entry, eps) * norm_weight_D.float()
    entry = rotate_tail(entry, rope, positions_N).to(compute).float()
    return hadamard_transform(entry).to(compute).float() if cache.layout.kind == "index_key" else entry


def _remember(plan: AttentionPlan, values_TC: Tensor, scores_TC: Tensor, state: CompressorState) -> None:
    """Writes the last rows of each request into its ring; earlier ones would be overwritten anyway."""
    batch = plan.batch
    ring = state.rows_SB2C.shape[1]
    positions_T, requests_T = batch.positions_T.long(), batch.token_requests_T.long().clamp_min(0)
    last_T = batch.seqlens_R.long()[requests_T] - 1
    kept_N = ((positions_T >= 0) & (positions_T > last_T - ring)).nonzero()[:, 0]
    slots_N = batch.state_slots_R.long()[requests_T[kept_N]]
    rows_N2C = torch.stack((values_TC[kept_N].float(), scores_TC[kept_N]), dim=1)
    state.rows_SB2C[slots_N, positions_T[kept_N] % ring] = rows_N2C
