"""Sparse attention over selected window and compressed rows, which are keys and values at once.

T tokens, H heads, D lanes, K entries of a selection, S splits. One program serves one token, a block of heads and one
part of the token's rows. With several parts, `combine_splits` joins them; the work is divided by the token's own
lengths, so that a token's bits do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.combine_splits import combine_splits
from halocline.kernels_portable.page_rows import PageLayout, load_rows, row_constants
from halocline.kernels_portable.target import Target

__all__ = ["AttentionTiles", "SelectedRows", "attention_tiles", "num_attention_splits", "sparse_attention"]

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 32


@dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """Tile sizes.

    Attributes:
        heads: Heads of a program, at least 16.
        rows: Rows of a step, at least 16.
        num_warps: Warps (waves) of a program.
        num_stages: Depth of the software pipeline.
    """

    heads: int
    rows: int
    num_warps: int
    num_stages: int


class SelectedRows(NamedTuple):
    """One cache and the rows of it that each token sees: pages, layout, int32 slots (T, K), int32 lengths (T,)."""

    pages: Tensor
    layout: PageLayout
    slots_TK: Tensor
    lengths_T: Tensor


def attention_tiles(target: Target, num_heads: int, dtype: torch.dtype) -> AttentionTiles:
    """Tile sizes for a device: as many heads share a row as its on-chip memory and registers carry."""
    heads = max(16, triton.next_power_of_2(num_heads))
    if dtype == torch.float32:
        return AttentionTiles(heads=16, rows=16, num_warps=4, num_stages=1)
    if not target.has_large_tiles:
        return AttentionTiles(heads=16, rows=32, num_warps=4, num_stages=1)
    if target.wave_size == 64:
        return AttentionTiles(heads=min(heads, 32), rows=32, num_warps=4, num_stages=1)
    if heads >= 64:
        return AttentionTiles(heads=64, rows=64, num_warps=8, num_stages=2)
    return AttentionTiles(heads=heads, rows=32, num_warps=4, num_stages=2)


def num_attention_splits(
    target: Target, tiles: AttentionTiles, *, num_tokens: int, num_heads: int, num_entries: int, batch_invariant: bool
) -> int:
    """Parts into which each token's rows are divided, so that few tokens fill the device too.

    Args:
        target: Device.
        tiles: From `attention_tiles`.
        num_tokens: Tokens of the launch.
        num_heads: Heads.
        num_entries: Capacity of the selections together.
        batch_invariant: Whether the answer must not depend on the number of tokens.

    Returns:
        A power of two, 1 for no division.
    """
    most = min(_MOST_SPLITS, int(triton.next_power_of_2(triton.cdiv(num_entries, tiles.rows))))
    if batch_invariant:
        return min(most, 8)
    programs = max(1, num_tokens) * -(-num_heads // tiles.heads)
    wanted = target.num_processors // programs
    return min(most, 1 << (wanted.bit_length() - 1)) if wanted > 1 else 1


@triton.jit
def _attend(
    q, weighted, total, largest, pages_ptr, slots_ptr, length, first, last, scale, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles [first, last) of one selection; `scale` turns products into powers of two."""
    for tile in range(first, last):
        entries = tile * ROWS + tl.arange(0, ROWS)
        slots = tl.load(slots_ptr + entries, mask=entries < length, other=-1)
        seen = slots >= 0
        rows = load_rows(
            pages_ptr, slots, seen, WIDTH, ROPE, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, ROWS, LANES, q.dtype
        )
        scores = tl.dot(q, tl.trans(rows), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        shares = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(shares, axis=1)
        weighted = weighted * shrink[:, None] + tl.dot(shares.to(q.dtype), rows, input_precision="ieee")
        largest = new_largest
    return weighted, total, largest


@triton.jit(do_not_specialize_on_alignment=["window_lengths_ptr", "lengths_ptr"])
def _sparse_attention_kernel(  # size: one program text for both caches and both endings
    q_ptr, q_stride, window_pages_ptr, window_slots_ptr, window_slots_stride, window_lengths_ptr, pages_ptr, slots_ptr,
    slots_stride, lengths_ptr, sink_ptr, out_ptr, lse_ptr, num_heads, scale, WINDOW_ENTRIES: tl.constexpr,
    ENTRIES: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    WINDOW_FORMAT: tl.constexpr, WINDOW_PAGE_ROWS: tl.constexpr, WINDOW_PAGE_STRIDE: tl.constexpr,
    WINDOW_FNUZ: tl.constexpr, FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    FNUZ: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)
    inside = (heads < num_heads)[:, None] & (lanes < WIDTH)[None, :]
    q = tl.load(q_ptr + token * q_stride + heads[:, None] * WIDTH + lanes[None, :], mask=inside, other=0.0)

    window_length = tl.minimum(tl.load(window_lengths_ptr + token), WINDOW_ENTRIES)
    window_tiles = tl.cdiv(window_length, ROWS)
    length = 0
    if ENTRIES > 0:
        length = tl.minimum(tl.load(lengths_ptr + token), ENTRIES)
    tiles = window_tiles + tl.cdiv(length, ROWS)
    share = tl.cdiv(tiles, SPLITS)
    first = split * share
    last = tl.minimum(first + share, tiles)

    weighted = tl.zeros((HEADS, LANES), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    weighted, total, largest = _attend(
        q, weighted, total, largest, window_pages_ptr, window_slots_ptr + token * window_slots_stride, window_length,
        first, tl.minimum(last, window_tiles), scale, WIDTH, ROPE, WINDOW_FORMAT, WINDOW_PAGE_ROWS,
        WINDOW_PAGE_STRIDE, WINDOW_FNUZ, ROWS, LANES,
    )  # fmt: skip
    if ENTRIES > 0:
        weighted, total, largest = _attend(
            q, weighted, total, largest, pages_ptr, slots_ptr + token * slots_stride, length,
            tl.maximum(first, window_tiles) - window_tiles, last - window_tiles, scale, WIDTH, ROPE, FORMAT,
            PAGE_ROWS, PAGE_STRIDE, FNUZ, ROWS, LANES,
        )  # fmt: skip

    seen = total > 0
    base = tl.where(seen, largest, 0.0)
    lse = base + tl.log2(tl.where(seen, total, 1.0))
    if SPLITS == 1:
        sink = tl.load(sink_ptr + heads, mask=heads < num_heads, other=0.0).to(tl.float32) * 1.4426950408889634
        whole = total + tl.exp2(sink - base)
        out = weighted * tl.where(seen, 1.0 / tl.where(seen, whole, 1.0), 0.0)[:, None]
        lse = tl.where(seen, lse * 0.6931471805599453, float("inf"))
        place = token * num_heads + heads
    else:
        out = weighted * tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)[:, None]
        lse = tl.where(seen, lse, float("-inf"))
        place = (token * SPLITS + split) * num_heads + heads
    tl.store(out_ptr + place[:, None] * WIDTH + lanes[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + place, lse, mask=heads < num_heads)


def sparse_attention(
    q_THD: Tensor,
    window: SelectedRows,
    compressed: SelectedRows | None,
    sink_H: Tensor,
    *,
    scale: float,
    tiles: AttentionTiles,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Attends from each token to its rows of one or two caches, in one softmax.

    Args:
        q_THD: (tokens, heads, width) bfloat16 or float32, heads and lanes contiguous, rotated, not scaled.
        window: Window cache and rows.
        compressed: Compressed cache and rows, or None. -1 is a hole; entries at and behind a length are ignored.
        sink_H: (heads,) float32 logits that enlarge the denominator only.
        scale: Multiplies q . row.
        tiles: From `attention_tiles`.
        num_splits: From `num_attention_splits`; 1 for prefill.

    Returns:
        Output, element type of the query, and float32 natural log-sum-exp without the sink; zeros and +inf for a
        token that sees no row.
    """
    num_tokens, num_heads, width = q_THD.shape
    q_THD = q_THD if q_THD.stride()[1:] == (width, 1) else q_THD.contiguous()
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q_THD.device)
    if not num_tokens:
        return out, lse
    other = compressed or window
    part_out, part_lse = out, lse
    if num_splits > 1:
        part_out = torch.empty((num_tokens, num_splits, num_heads, width), dtype=torch.float32, device=q_THD.device)
        part_lse = torch.empty((num_tokens, num_splits, num_heads), dtype=torch.float32, device=q_THD.device)
    _sparse_attention_kernel[(num_tokens, triton.cdiv(num_heads, tiles.heads), num_splits)](
        q_THD, q_THD.stride(0), window.pages, window.slots_TK, window.slots_TK.stride(0), window.lengths_T,
        other.pages, other.slots_TK, other.slots_TK.stride(0), other.lengths_T, sink_H, part_out, part_lse, num_heads,
        scale * _LOG2_E, WINDOW_ENTRIES=window.slots_TK.shape[1],
        ENTRIES=compressed.slots_TK.shape[1] if compressed else 0, SPLITS=num_splits, WIDTH=width,
        ROPE=window.layout.rope_width, **row_constants(window.layout, "WINDOW_"), **row_constants(other.layout),
        HEADS=tiles.heads, ROWS=tiles.rows, LANES=max(64, triton.next_power_of_2(width)),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        combine_splits(part_out, part_lse, sink_H, out, lse)
    return out, lse
