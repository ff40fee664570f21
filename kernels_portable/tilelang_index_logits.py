"""Scores of closed blocks in tilelang: sum over index heads of weight * relu(query . key), over paged FP8 keys.

T tokens, H index heads, I lanes, S entries. Codes of queries and keys are widened to bfloat16, which holds every E4M3
number, so that both dialects and every device multiply the same numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import tilelang.language as T  # noqa: N812 (its own idiom)
import torch
from torch import Tensor

from halocline.kernels_portable.page_rows import PageLayout
from halocline.kernels_portable.target import Target
from halocline.kernels_portable.tilelang_number_codes import decode_e4m3
from halocline.kernels_portable.tilelang_program import compiled, jit_program, num_threads

__all__ = ["index_logits_program", "index_logits_tilelang"]

_KEYS = 64  # keys of a program: a page of the released models


def index_logits_program(
    heads: int, width: int, page_rows: int, fnuz: bool, query: Literal["codes", "bfloat16"], threads: int
) -> Any:
    """The program for sizes, the dialect of the codes and the form of the queries."""
    tokens, requests, pages_of, pages, entries = (
        T.dynamic(name) for name in ("tokens", "requests", "pages_of", "pages", "entries")
    )
    block, words = max(16, -(-heads // 16) * 16), width // 4
    coded = query == "codes"

    @jit_program(
        q=T.Tensor((tokens, heads, words if coded else width), "uint32" if coded else "bfloat16"),
        weights=T.Tensor((tokens, heads), "float32"),
        visible=T.Tensor((tokens,), "int32"),
        request_of=T.Tensor((tokens,), "int32"),
        token_pages=T.Tensor((requests, pages_of), "int32"),
        cache=T.Tensor((pages, page_rows * (words + 1)), "uint32"),
        out=T.Tensor((tokens, entries), "float32"),
    )
    def index_logits(q, weights, visible, request_of, token_pages, cache, out):
        with T.Kernel(tokens, T.ceildiv(entries, _KEYS), threads=threads) as (token, key_block):
            q_s = T.alloc_shared((block, width), "bfloat16")
            keys_s = T.alloc_shared((_KEYS, width), "bfloat16")
            scores = T.alloc_fragment((_KEYS, block), "float32")
            sums = T.alloc_fragment((_KEYS,), "float32")
            page_s = T.alloc_shared((_KEYS,), "int32")
            request, first = request_of[token], key_block * _KEYS
            if first < visible[token] and request >= 0:
                if coded:
                    for h, w in T.Parallel(block, words):
                        four = T.if_then_else(h < heads, q[token, h, w], T.uint32(0))
                        for v in T.serial(4):
                            code = T.Cast("uint16", (four >> T.Cast("uint32", v * 8)) & T.uint32(0xFF))
                            q_s[h, w * 4 + v] = decode_e4m3(code, fnuz)
                else:
                    for h, d in T.Parallel(block, width):
                        q_s[h, d] = T.if_then_else(h < heads, q[token, h, d], T.bfloat16(0))
                for r in T.Parallel(_KEYS):
                    page_s[r] = T.if_then_else(
                        first + r < visible[token], token_pages[request, (first + r) // page_rows], -1
                    )
                for r, w in T.Parallel(_KEYS, words):
                    page = T.Cast("int64", T.max(page_s[r], 0))
                    four = T.if_then_else(page_s[r] >= 0, cache[page, (first + r) % page_rows * words + w], T.uint32(0))
                    for v in T.serial(4):
                        code = T.Cast("uint16", (four >> T.Cast("uint32", v * 8)) & T.uint32(0xFF))
                        keys_s[r, w * 4 + v] = decode_e4m3(code, fnuz)
                T.clear(scores)
                T.gemm(keys_s, q_s, scores, transpose_B=True)
                for r, h in T.Parallel(_KEYS, block):
                    weight = T.if_then_else(h < heads, weights[token, h], 0.0)
                    scores[r, h] = T.max(scores[r, h], 0.0) * weight
                T.reduce_sum(scores, sums, dim=1)
                for r in T.Parallel(_KEYS):
                    if first + r < visible[token]:
                        page = T.Cast("int64", T.max(page_s[r], 0))
                        scale = T.reinterpret(cache[page, page_rows * words + (first + r) % page_rows], "float32")
                        out[token, first + r] = sums[r] * T.if_then_else(page_s[r] >= 0, scale, 0.0)

    return index_logits


def index_logits_tilelang(
    q_THI: Tensor,
    weights_TH: Tensor,
    visible_T: Tensor,
    requests_T: Tensor,
    token_pages_RP: Tensor,
    pages: Tensor,
    layout: PageLayout,
    *,
    num_entries: int,
    target: Target,
) -> Tensor:
    """Scores every closed block that a token sees; arguments and result as `index_logits.index_logits`.

    Args:
        q_THI: Contiguous queries: bfloat16 values, or E4M3 codes in the dialect of the cache.
        weights_TH: (tokens, heads) float32.
        visible_T: int32 entries that each token sees.
        requests_T: int32 request of each token; -1 on padding.
        token_pages_RP: int32 pages of each request.
        pages: uint8 pages of index keys.
        layout: Of the pages; `fp8_row` keys of a multiple of 16 lanes.
        num_entries: Width of the result, at least the largest visible count.
        target: Device.
    """
    num_tokens, num_heads, width = q_THI.shape
    if layout.format.value != "fp8_row" or width % 16:
        raise ValueError(
            f"keys of {width} lanes in {layout.format.value}: this kernel reads fp8_row, 16 lanes at a time"
        )
    out = torch.empty((num_tokens, num_entries), dtype=torch.float32, device=q_THI.device)
    if num_tokens and num_entries:
        coded = q_THI.element_size() == 1
        query: Literal["codes", "bfloat16"] = "codes" if coded else "bfloat16"
        fnuz, threads = layout.fp8_dialect == "fnuz", num_threads(target.wave_size)
        kernel = compiled(index_logits_program, num_heads, width, layout.page_rows, fnuz, query, threads)
        kernel(
            q_THI.view(torch.uint32) if coded else q_THI,
            weights_TH,
            visible_T.contiguous(),
            requests_T.contiguous(),
            token_pages_RP.contiguous(),
            pages.view(torch.uint32),
            out,
        )
    return out
