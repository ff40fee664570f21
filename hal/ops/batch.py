"""What one step works on: tokens, requests and page tables, as tensors at capacity. Data, not an op.

Shapes: T tokens, R requests, P pages of a request. Tensors are views of persistent buffers, refreshed in place, so
that a captured graph reads this step's values; counts are host integers.

A request's cache lives in two kinds of pages. A *window page* holds `window_page_rows` consecutive window rows of
every layer; pages older than the window are freed and their table entries become -1. A *token page* covers
`page_tokens` consecutive tokens (a multiple of 128) and holds, under one number, the compressed rows of those tokens
in every compressed layer: page_tokens / 4 rows and index keys, or page_tokens / 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BatchMetadata", "CacheGeometry"]


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """Sizes that tie positions to cache rows; facts of the model and of the page sizes, not of a batch.

    Attributes:
        window: Positions that a query sees directly, its own included.
        window_page_rows: Window rows in a window page.
        page_tokens: Tokens covered by a token page; a multiple of every compression ratio.
        ratios: Compression ratios in use besides 0, for example (4, 128).
        index_topk: Compressed entries kept in ratio-4 layers.
        max_positions: Positions that any request may reach.
    """

    window: int
    window_page_rows: int
    page_tokens: int
    ratios: tuple[int, ...]
    index_topk: int
    max_positions: int

    def page_rows(self, ratio: int) -> int:
        """Compressed rows of one token page in a layer of this ratio."""
        return self.page_tokens // ratio


@dataclass(eq=False, kw_only=True)
class BatchMetadata:
    """The tokens of one step.

    Requests that decode come first and bring `num_decode_tokens` tokens in all; requests that prefill follow. Within a
    request, tokens are consecutive positions. Rows behind the counts are padding: position -1, request -1.

    Attributes:
        token_ids_T: int32 ids.
        positions_T: int32 absolute positions, the first token of a request being 0; -1 on padding.
        token_requests_T: int32 index into the request arrays; -1 on padding.
        query_starts_R1: int32 first token of each request, then the number of tokens; constant behind the end.
        seqlens_R: int32 tokens of each request after this step; 0 on padding.
        state_slots_R: int32 row of each request in compressor state; -1 on padding.
        window_pages_RP: int32 window page of each `window_page_rows` positions; -1 where freed or not yet there.
        token_pages_RP: int32 token page of each `page_tokens` positions; -1 where not yet there.
        num_tokens: Tokens in use.
        num_requests: Requests in use.
        num_decode_tokens: Tokens of the requests that decode.
        num_decode_requests: Requests that decode.
        max_seqlen: Largest entry of `seqlens_R`, a bound on the host; in a captured graph the capacity.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    token_requests_T: Tensor
    query_starts_R1: Tensor
    seqlens_R: Tensor
    state_slots_R: Tensor
    window_pages_RP: Tensor
    token_pages_RP: Tensor
    num_tokens: int
    num_requests: int
    num_decode_tokens: int
    num_decode_requests: int
    max_seqlen: int
