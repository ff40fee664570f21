"""Index logits by DeepGEMM. Shapes as in `halocline.hal.ops.indexer`.

Tokens of one request that prefills read its keys gathered in one piece; any other tokens read them through the page
table, each for itself.

The library's scheduler reads outside of its shared memory when no token of a multiple of 32 sees any key, as in a step
of padding. So each token is said to see one key or more, and pages that are not there are read as page 0; what comes
of it lies behind the visible entries, where logits are undefined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_cuda.gemm_deep_gemm import deep_gemm
from halocline.backends_triton.indexer_triton import num_index_entries
from halocline.backends_triton.step_state import once_per_step
from halocline.hal.codecs import quantize_fp8_row
from halocline.hal.errors import ShapeError
from halocline.hal.formats import RowFormat
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.indexer import IndexQuery, logits
from halocline.hal.ops.kv_cache import CacheHandle

__all__ = ["logits_deep_gemm", "logits_schedule"]

_OWNER = "deep_gemm"
_PAGE_ROWS = 64  # the only page of keys that the kernel reads on sm_90
_FEW_TOKENS = 64  # up to here, gathering keys costs more than it saves
_SCHEDULED = 32  # tokens; the library has one kernel of schedules for up to as many


@implements(logits)
def logits_deep_gemm(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, *, first_token: int) -> Tensor:
    """See the contract."""
    num_tokens, num_heads, width = query.q_THI.shape
    layout = cache.layout
    if layout.width != width:
        raise ShapeError(f"index queries of {width} lanes against keys of {layout.width}")
    if layout.format is not RowFormat.FP8_ROW or layout.page_rows != _PAGE_ROWS or num_heads not in (32, 64):
        raise ShapeError(
            f"{num_heads} index heads over {layout.name}: DeepGEMM takes 32 or 64 heads over fp8_row pages of "
            f"{_PAGE_ROWS} keys; token pages of {4 * _PAGE_ROWS} tokens have them, or use indexer.logits=triton"
        )
    num_entries = num_index_entries(plan)
    if not num_tokens:
        return torch.empty((0, num_entries), dtype=torch.float32, device=query.q_THI.device)
    query = _coded(query)
    batch = plan.batch
    alone = batch.num_requests - batch.num_decode_requests == 1 and first_token >= batch.num_decode_tokens
    if alone and num_tokens > _FEW_TOKENS:
        return _gathered(plan, query, cache, first_token, num_entries)
    return _paged(plan, query, cache, first_token, num_entries)


def _coded(query: IndexQuery) -> IndexQuery:
    """Queries as E4M3 codes, their scale folded into the weights; values that were rounded so lose nothing."""
    if query.q_THI.dtype == torch.float8_e4m3fn:
        return IndexQuery(query.q_THI.contiguous(), query.weights_TH.float().contiguous())
    codes, scale = quantize_fp8_row(query.q_THI.float().flatten(0, 1))
    shape = query.weights_TH.shape
    return IndexQuery(codes.view(torch.float8_e4m3fn).view_as(query.q_THI), query.weights_TH * scale.view(shape))


def _paged(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, first_token: int, num_entries: int) -> Tensor:
    library, num_tokens = deep_gemm(), query.q_THI.shape[0]
    stop = first_token + num_tokens

    def read_plan() -> tuple[Tensor, Tensor, Tensor]:
        lengths_T1 = plan.visible[4][first_token:stop, None].clamp_min(1)
        requests_T = plan.batch.token_requests_T[first_token:stop].clamp_min(0)
        columns = -(-num_entries // _PAGE_ROWS)
        table_TP = plan.batch.token_pages_RP[:, :columns].index_select(0, requests_T).clamp_min_(0)
        return lengths_T1, table_TP, logits_schedule(lengths_T1)

    key = (first_token, num_tokens, num_entries)
    lengths_T1, table_TP, schedule = once_per_step(plan, _OWNER, key, read_plan)
    pages = cache.pages.view(cache.num_pages, _PAGE_ROWS, 1, cache.layout.row_bytes)
    logits_TS = library.fp8_paged_mqa_logits(
        query.q_THI[:, None],
        pages,
        query.weights_TH,
        lengths_T1,
        table_TP,
        schedule,
        num_entries,
        clean_logits=False,
    )
    return _tensor(logits_TS)


def logits_schedule(lengths_T1: Tensor) -> Tensor:
    """The library's division of work, by a kernel that it compiles for each multiple of 32 tokens.

    So that these are few, it is asked about a power of two of them; those behind the last one see no key, and the
    schedule ends where they begin.
    """
    library, num_tokens = deep_gemm(), lengths_T1.shape[0]
    wanted = 1 << (num_tokens - 1).bit_length()
    if num_tokens <= _SCHEDULED or wanted == num_tokens:
        return _tensor(library.get_paged_mqa_logits_metadata(lengths_T1, _PAGE_ROWS, library.get_num_sms()))
    padded_T1 = torch.nn.functional.pad(lengths_T1, (0, 0, 0, wanted - num_tokens))
    schedule_P2 = _tensor(library.get_paged_mqa_logits_metadata(padded_T1, _PAGE_ROWS, library.get_num_sms()))
    schedule_P2[:, 0].clamp_(max=num_tokens)
    return schedule_P2


def _gathered(plan: AttentionPlan, query: IndexQuery, cache: CacheHandle, first_token: int, num_entries: int) -> Tensor:
    """One request: its keys side by side, so that a key is read once for many queries."""
    stop, width = first_token + query.q_THI.shape[0], cache.layout.width
    request = plan.batch.token_requests_T[first_token : first_token + 1].clamp_min(0).long()
    num_pages = -(-num_entries // _PAGE_ROWS)
    pages_P = plan.batch.token_pages_RP[:, :num_pages].index_select(0, request)[0].clamp_min(0).long()
    gathered = cache.pages.index_select(0, pages_P)
    data = _PAGE_ROWS * width
    codes_SI = gathered[:, :data].reshape(-1, width).view(torch.float8_e4m3fn)
    scale_S = gathered[:, data:].contiguous().view(torch.float32).flatten()
    end_T = plan.visible[4][first_token:stop].contiguous()
    logits_TS = deep_gemm().fp8_mqa_logits(
        query.q_THI, (codes_SI, scale_S), query.weights_TH, torch.zeros_like(end_T), end_T, clean_logits=False
    )
    return _tensor(logits_TS)[:, :num_entries]


def _tensor(found: object) -> Tensor:
    """The library hands out its own tensor type where it is not built against torch."""
    return found if isinstance(found, Tensor) else torch.utils.dlpack.from_dlpack(found)
