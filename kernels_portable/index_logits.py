"""Scores of closed blocks: sum over index heads of weight * relu(query . key), over paged keys.

T tokens, H index heads, I lanes, S entries, R requests, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.number_codes import decode_e4m3
from halocline.kernels_portable.page_rows import PageLayout, load_rows, row_constants
from halocline.kernels_portable.target import Target

__all__ = ["LogitTiles", "index_logits", "logit_tiles"]


_COLUMNS = 64  # of which rows are a multiple, so that what loads several at once is one kernel for all lengths


@dataclass(frozen=True, kw_only=True)
class LogitTiles:
    """Tile sizes: keys of a step, steps of a program, warps and depth of the pipeline."""

    keys: int
    steps: int
    num_warps: int
    num_stages: int


def logit_tiles(target: Target, dtype: torch.dtype) -> LogitTiles:
    """Tile sizes for a device and an element type of queries."""
    if dtype == torch.float32:
        return LogitTiles(keys=32, steps=2, num_warps=4, num_stages=1)
    return LogitTiles(keys=64, steps=2, num_warps=4, num_stages=2 if target.has_large_tiles else 1)


@triton.jit(do_not_specialize_on_alignment=["visible_ptr", "requests_ptr"])
def _index_logits_kernel(
    q_ptr, weights_ptr, visible_ptr, requests_ptr, token_pages_ptr, token_pages_stride, pages_ptr, out_ptr, out_stride,
    num_heads, FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (KEYS * STEPS)
    visible = tl.load(visible_ptr + token)
    request = tl.load(requests_ptr + token).to(tl.int64)
    if (first >= visible) | (request < 0):
        return
    heads = tl.arange(0, HEADS)
    lanes = tl.arange(0, WIDTH)
    present = heads < num_heads
    q = tl.load(q_ptr + (token * num_heads + heads[:, None]) * WIDTH + lanes[None, :], mask=present[:, None], other=0.0)
    weights = tl.load(weights_ptr + token * num_heads + heads, mask=present, other=0.0)
    for step in range(STEPS):
        entries = first + step * KEYS + tl.arange(0, KEYS)
        page = tl.load(
            token_pages_ptr + request * token_pages_stride + entries // PAGE_ROWS, mask=entries < visible, other=-1
        )
        slots = page.to(tl.int64) * PAGE_ROWS + entries % PAGE_ROWS
        seen = page >= 0
        scale = tl.full((KEYS,), 1.0, tl.float32)
        if FORMAT == "fp8_row":
            base = page.to(tl.int64) * PAGE_STRIDE
            row = entries % PAGE_ROWS
            codes = tl.load(pages_ptr + (base + row * WIDTH)[:, None] + lanes[None, :], mask=seen[:, None], other=0)
            scale = tl.load(
                (pages_ptr + (base + PAGE_ROWS * WIDTH + row * 4)).to(tl.pointer_type(tl.float32)), mask=seen, other=0.0
            )
            keys = codes.to(q.dtype, bitcast=True) if q.dtype.is_fp8() else decode_e4m3(codes, FNUZ).to(q.dtype)
        else:
            keys = load_rows(
                pages_ptr, slots, seen, WIDTH, 0, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, KEYS, WIDTH, q.dtype
            )
        products = tl.dot(q, tl.trans(keys), input_precision="bf16x6", out_dtype=tl.float32)
        scores = tl.sum(weights[:, None] * tl.maximum(products, 0.0), axis=0) * scale
        tl.store(out_ptr + token * out_stride + entries, scores, mask=entries < visible)


def index_logits(
    q_THI: Tensor,
    weights_TH: Tensor,
    visible_T: Tensor,
    requests_T: Tensor,
    token_pages_RP: Tensor,
    pages: Tensor,
    layout: PageLayout,
    *,
    num_entries: int,
    tiles: LogitTiles,
) -> Tensor:
    """Scores every closed block that a token sees.

    Args:
        q_THI: Contiguous queries: float32 or bfloat16 values, or E4M3 codes in the dialect of the cache.
        weights_TH: (tokens, heads) float32.
        visible_T: int32 entries that each token sees.
        requests_T: int32 request of each token; -1 on padding.
        token_pages_RP: int32 pages of each request.
        pages: uint8 pages of index keys.
        layout: Of the pages. E4M3 queries need `fp8_row` keys.
        num_entries: Width of the result, at least the largest visible count.
        tiles: From `logit_tiles`.

    Returns:
        (tokens, num_entries) float32; undefined at and behind a token's visible count. Rows begin at multiples of 64
        entries.
    """
    num_tokens, num_heads, width = q_THI.shape
    if q_THI.element_size() == 1 and layout.format.value != "fp8_row":
        raise ValueError(f"E4M3 index queries against {layout.format.value} keys: fp8_row keys are needed")
    columns = triton.cdiv(num_entries, _COLUMNS) * _COLUMNS
    out = torch.empty((num_tokens, columns), dtype=torch.float32, device=q_THI.device)[:, :num_entries]
    if num_tokens and num_entries:
        _index_logits_kernel[(num_tokens, triton.cdiv(num_entries, tiles.keys * tiles.steps))](
            q_THI, weights_TH, visible_T, requests_T, token_pages_RP, token_pages_RP.stride(0), pages, out,
            out.stride(0), num_heads, WIDTH=width, HEADS=max(16, triton.next_power_of_2(num_heads)), KEYS=tiles.keys,
            STEPS=tiles.steps, **row_constants(layout), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out
