"""Reference indexer. Shapes as in `halocline.hal.ops.indexer`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from halocline.backends_reference.hadamard import hadamard_transform
from halocline.backends_reference.kv_cache import read_rows_reference
from halocline.backends_reference.plan import slots_of_positions
from halocline.backends_reference.rope import rotate_tail
from halocline.hal.codecs import round_trip_fp4, round_trip_fp8_row
from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan, RowSelection
from halocline.hal.ops.indexer import IndexQuery, logits, prepare_query, select
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable

__all__ = ["logits_reference", "prepare_query_reference", "select_reference"]


@implements(prepare_query)
def prepare_query_reference(
    plan: AttentionPlan,
    q_THI: Tensor,
    weights_TH: Tensor,
    rope: RopeTable,
    *,
    rounding: Literal["none", "fp4_group32", "fp8_row"],
) -> IndexQuery:
    """See the contract."""
    _, num_heads, width = q_THI.shape
    if weights_TH.shape[1] != num_heads:
        raise ShapeError(f"{num_heads} index heads but {weights_TH.shape[1]} head weights")
    weights_TH = weights_TH.float() * (width**-0.5 * num_heads**-0.5)
    rotated = rotate_tail(q_THI.float(), rope, plan.batch.positions_T)
    if rounding == "none":
        return IndexQuery(hadamard_transform(rotated), weights_TH)
    transformed = hadamard_transform(rotated.bfloat16().float()).bfloat16().float()
    if rounding == "fp4_group32":
        return IndexQuery(round_trip_fp4(transformed, 32), weights_TH)
    return IndexQuery(round_trip_fp8_row(transformed), weights_TH)


@implements(logits)
def logits_reference(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> Tensor:
    """See the contract."""
    batch, (num_tokens, _, width) = plan.batch, query.q_THI.shape
    if cache.layout.width != width:
        raise ShapeError(f"index queries of {width} lanes against keys of {cache.layout.width}")
    requests_T = batch.token_requests_T[first_token : first_token + num_tokens]
    num_entries = max(batch.max_seqlen // 4, 1)
    logits_TS = torch.full((num_tokens, num_entries), -torch.inf, device=query.q_THI.device)
    entries_1S = torch.arange(num_entries, device=logits_TS.device)[None]
    for request in requests_T.unique().tolist():
        if request < 0:
            continue
        tokens_N = (requests_T == request).nonzero()[:, 0]
        seen = int(plan.visible[4][first_token + tokens_N].max())
        slots_S = slots_of_positions(
            batch.token_pages_RP, requests_T[tokens_N[:1]], entries_1S[:, :seen], cache.layout.page_rows
        )[0]
        keys_SI = read_rows_reference(cache, slots_S)
        scores_NHS = torch.relu(query.q_THI[tokens_N].float() @ keys_SI.T)
        scores_NS = torch.einsum("nhs,nh->ns", scores_NHS, query.weights_TH[tokens_N])
        logits_TS = logits_TS.index_put((tokens_N[:, None], entries_1S[:, :seen]), scores_NS)
    return logits_TS


@implements(select)
def select_reference(
    plan: AttentionPlan, logits_TS: Tensor, *, first_token: int, num_kept: int, page_rows: int
) -> RowSelection:
    """See the contract."""
    num_tokens, num_entries = logits_TS.shape
    visible_T = plan.visible[4][first_token : first_token + num_tokens]
    if num_tokens and int(visible_T.max()) > num_entries:
        raise ShapeError(f"{int(visible_T.max())} visible entries but logits for {num_entries}")
    inside_TS = torch.arange(num_entries, device=logits_TS.device) < visible_T[:, None]
    # A visible entry that scores -inf still beats every filler.
    lowest = torch.finfo(torch.float32).min
    ranked_TS = logits_TS.clamp_min(lowest).masked_fill(~inside_TS, -torch.inf)
    kept = min(num_kept, num_entries)
    entries_TK = torch.full((num_tokens, num_kept), -1, device=logits_TS.device, dtype=torch.int64)
    entries_TK[:, :kept] = ranked_TS.topk(kept, dim=-1).indices
    lengths_T = visible_T.clamp_max(num_kept)
    entries_TK.masked_fill_(torch.arange(num_kept, device=logits_TS.device) >= lengths_T[:, None], -1)
    requests_T = plan.batch.token_requests_T[first_token : first_token + num_tokens]
    slots_TK = slots_of_positions(plan.batch.token_pages_RP, requests_T, entries_TK, page_rows)
    return RowSelection(slots_TK.int(), lengths_T)
