"""Sparse attention in tilelang over selected latent rows of 584 bytes, which are keys and values at once.

T tokens, H heads, D lanes (448 coded, 64 rotary), K entries of a selection, S splits. One program serves one token, a
block of heads and one part of the token's rows; with several parts, `_combine_program` joins them. No step depends
on how many threads make a wave: rows and heads are only ever divided by the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T  # noqa: N812 (its own idiom)
import torch
from torch import Tensor

from halocline.kernels_portable.page_rows import PageLayout
from halocline.kernels_portable.sparse_attention import SelectedRows
from halocline.kernels_portable.target import Target
from halocline.kernels_portable.tilelang_number_codes import decode_e4m3, power_of_two
from halocline.kernels_portable.tilelang_program import compiled, jit_macro, jit_program

__all__ = [
    "LatentPages",
    "TilelangTiles",
    "attention_tiles",
    "combine_program",
    "sparse_attention_program",
    "sparse_attention_tilelang",
]

_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_CODED, _ROTARY = 448, 64
_WIDTH = _CODED + _ROTARY
_ROW_BYTES = _CODED + 2 * _ROTARY
_SCALE_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class TilelangTiles:
    """Tile sizes.

    Attributes:
        heads: Heads of a program, a multiple of 16.
        rows: Rows of a step, a multiple of 16.
        threads: Threads of a program, whole waves.
    """

    heads: int
    rows: int
    threads: int


def attention_tiles(target: Target, num_heads: int) -> TilelangTiles:
    """Tile sizes for a device: query, rows and shares of a step lie in on-chip memory together."""
    if not target.has_large_tiles:
        return TilelangTiles(heads=16, rows=32, threads=2 * target.wave_size)
    heads = 64 if num_heads > 32 and target.wave_size == 32 else 32 if num_heads > 16 else 16
    return TilelangTiles(heads=heads, rows=64, threads=4 * target.wave_size if heads < 64 else 256)


@dataclass(frozen=True, kw_only=True)
class LatentPages:
    """What a program must know of a cache of latent rows."""

    page_rows: int
    page_stride: int
    fnuz: bool

    @classmethod
    def of(cls, layout: PageLayout) -> LatentPages:
        """Reads a layout; any but rows of 448 coded and 64 rotary lanes is refused."""
        if layout.format.value != "fp8_block64" or (layout.width, layout.rope_width) != (_WIDTH, _ROTARY):
            raise ValueError(
                f"rows of {layout.width} lanes in {layout.format.value}: this kernel reads fp8_block64 rows of "
                f"{_CODED} + {_ROTARY} lanes"
            )
        return cls(page_rows=layout.page_rows, page_stride=layout.page_stride, fnuz=layout.fp8_dialect == "fnuz")


@jit_macro
def _gather(rows_s, slot_s, words, num_rows, cache):
    """Values of the rows in `slot_s`; zeros for a hole, whatever lies in the page that stands in for it."""
    row_words, tail = _ROW_BYTES // 4, _CODED // 4
    for r, w in T.Parallel(num_rows, tail):
        slot = T.max(slot_s[r], 0)
        page, row = T.Cast("int64", slot // cache.page_rows), slot % cache.page_rows
        four = words[page, row * row_words + w]
        group = w // 16
        scales = words[page, cache.page_rows * row_words + row * (_SCALE_BYTES // 4) + group // 4]
        byte = T.Cast("uint32", (scales >> T.Cast("uint32", group % 4 * 8)) & T.uint32(0xFF))
        step = T.if_then_else(slot_s[r] >= 0, power_of_two(byte), 0.0)
        for v in T.serial(4):
            code = T.Cast("uint16", (four >> T.Cast("uint32", v * 8)) & T.uint32(0xFF))
            rows_s[r, w * 4 + v] = decode_e4m3(code, cache.fnuz) * step
    for r, w in T.Parallel(num_rows, _ROTARY // 2):
        slot = T.max(slot_s[r], 0)
        page, row = T.Cast("int64", slot // cache.page_rows), slot % cache.page_rows
        two = T.if_then_else(slot_s[r] >= 0, words[page, row * row_words + tail + w], T.uint32(0))
        for v in T.serial(2):
            rows_s[r, _CODED + w * 2 + v] = T.reinterpret(T.Cast("uint16", two >> T.Cast("uint32", v * 16)), "bfloat16")


def sparse_attention_program(  # size: one program text for both caches and both endings
    heads: int,
    window: LatentPages,
    window_entries: int,
    other: LatentPages,
    entries: int,
    splits: int,
    tiles: TilelangTiles,
) -> Any:
    """The program for sizes, caches and tiles; `entries` 0 leaves the second cache out, `splits` 1 ends in output."""
    tokens, window_pages, pages = T.dynamic("tokens"), T.dynamic("window_pages"), T.dynamic("pages")
    block, rows = tiles.heads, tiles.rows
    ends = splits == 1
    out_type = T.Tensor((tokens, heads, _WIDTH), "bfloat16") if ends else None
    part_type = T.Tensor((tokens, splits, heads, _WIDTH), "float32")

    @jit_program(
        q=T.Tensor((tokens, heads, _WIDTH), "bfloat16"),
        window_words=T.Tensor((window_pages, window.page_stride // 4), "uint32"),
        window_slots=T.Tensor((tokens, window_entries), "int32"),
        window_lengths=T.Tensor((tokens,), "int32"),
        words=T.Tensor((pages, other.page_stride // 4), "uint32"),
        slots=T.Tensor((tokens, entries or window_entries), "int32"),
        lengths=T.Tensor((tokens,), "int32"),
        sink=T.Tensor((heads,), "float32"),
        out=out_type or part_type,
        lse=T.Tensor((tokens, heads) if ends else (tokens, splits, heads), "float32"),
        scale=T.float32,
    )
    def sparse_attention(  # noqa: PLR0912 # size: one program text
        q, window_words, window_slots, window_lengths, words, slots, lengths, sink, out, lse, scale
    ):
        with T.Kernel(tokens, T.ceildiv(heads, block), splits, threads=tiles.threads) as (token, head_block, split):
            q_s = T.alloc_shared((block, _WIDTH), "bfloat16")
            rows_s = T.alloc_shared((rows, _WIDTH), "bfloat16")
            shares_s = T.alloc_shared((block, rows), "bfloat16")
            slot_s = T.alloc_shared((rows,), "int32")
            scores = T.alloc_fragment((block, rows), "float32")
            weighted = T.alloc_fragment((block, _WIDTH), "float32")
            largest = T.alloc_fragment((block,), "float32")
            before = T.alloc_fragment((block,), "float32")
            base = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            tile_total = T.alloc_fragment((block,), "float32")
            T.clear(weighted)
            T.clear(total)
            T.fill(largest, -T.infinity("float32"))
            first_head = head_block * block
            for h, d in T.Parallel(block, _WIDTH):
                q_s[h, d] = T.if_then_else(first_head + h < heads, q[token, first_head + h, d], T.bfloat16(0))
            window_length = T.min(window_lengths[token], window_entries)
            length = T.min(lengths[token], entries)
            window_tiles = T.ceildiv(window_length, rows)
            num_tiles = window_tiles + T.ceildiv(length, rows)
            share = T.ceildiv(num_tiles, splits)
            for step in T.serial(T.max(T.min(share, num_tiles - split * share), 0)):
                tile = split * share + step
                if tile < window_tiles:
                    for r in T.Parallel(rows):
                        slot_s[r] = T.if_then_else(
                            tile * rows + r < window_length, window_slots[token, tile * rows + r], -1
                        )
                    _gather(rows_s, slot_s, window_words, rows, window)
                else:
                    for r in T.Parallel(rows):
                        entry = (tile - window_tiles) * rows + r
                        slot_s[r] = T.if_then_else(entry < length, slots[token, entry], -1)
                    _gather(rows_s, slot_s, words, rows, other)
                T.clear(scores)
                T.gemm(q_s, rows_s, scores, transpose_B=True)
                for h, r in T.Parallel(block, rows):
                    scores[h, r] = T.if_then_else(
                        slot_s[r] >= 0, scores[h, r] * (scale * _LOG2_E), -T.infinity("float32")
                    )
                T.copy(largest, before)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for h in T.Parallel(block):
                    base[h] = T.if_then_else(largest[h] == -T.infinity("float32"), 0.0, largest[h])
                for h, r in T.Parallel(block, rows):
                    scores[h, r] = T.exp2(scores[h, r] - base[h])
                T.reduce_sum(scores, tile_total, dim=1)
                for h in T.Parallel(block):
                    total[h] = total[h] * T.exp2(before[h] - base[h]) + tile_total[h]
                for h, d in T.Parallel(block, _WIDTH):
                    weighted[h, d] *= T.exp2(before[h] - base[h])
                T.copy(scores, shares_s)
                T.gemm(shares_s, rows_s, weighted)
            for h in T.Parallel(block):
                base[h] = T.if_then_else(total[h] > 0, largest[h], 0.0)
                tile_total[h] = total[h]  # the denominator
                if ends and first_head + h < heads:
                    tile_total[h] = total[h] + T.exp2(sink[first_head + h] * _LOG2_E - base[h])
            for h, d in T.Parallel(block, _WIDTH):
                weighted[h, d] = T.if_then_else(total[h] > 0, weighted[h, d] / tile_total[h], 0.0)
            for h in T.Parallel(block):
                total[h] = T.if_then_else(total[h] > 0, base[h] + T.log2(total[h]), -T.infinity("float32"))
            for h in T.Parallel(block):
                if first_head + h < heads:
                    if ends:
                        lse[token, first_head + h] = T.if_then_else(
                            total[h] == -T.infinity("float32"), T.infinity("float32"), total[h] * _LN_2
                        )
                    else:
                        lse[token, split, first_head + h] = total[h]
            for h, d in T.Parallel(block, _WIDTH):
                if first_head + h < heads:
                    if ends:
                        out[token, first_head + h, d] = weighted[h, d]
                    else:
                        out[token, split, first_head + h, d] = weighted[h, d]

    return sparse_attention


def combine_program(heads: int, splits: int, threads: int) -> Any:
    """Joins the parts of a divided softmax and adds the sink; each thread sums for its own lanes, none asks another."""
    tokens = T.dynamic("tokens")

    @jit_program(
        part=T.Tensor((tokens, splits, heads, _WIDTH), "float32"),
        part_lse=T.Tensor((tokens, splits, heads), "float32"),
        sink=T.Tensor((heads,), "float32"),
        out=T.Tensor((tokens, heads, _WIDTH), "bfloat16"),
        lse=T.Tensor((tokens, heads), "float32"),
    )
    def combine_splits(part, part_lse, sink, out, lse):
        with T.Kernel(tokens, heads, threads=threads) as (token, head):
            shares = T.alloc_local((splits,), "float32")
            largest = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            factor = T.alloc_local((1,), "float32")
            joined = T.alloc_fragment((_WIDTH,), "float32")
            largest[0] = -T.infinity("float32")
            for s in T.serial(splits):
                shares[s] = part_lse[token, s, head]
                largest[0] = T.max(largest[0], shares[s])
            seen = largest[0] > -T.infinity("float32")
            base = T.if_then_else(seen, largest[0], 0.0)
            total[0] = 0.0
            for s in T.serial(splits):
                shares[s] = T.exp2(shares[s] - base)
                total[0] += shares[s]
            factor[0] = T.if_then_else(seen, 1.0 / (total[0] + T.exp2(sink[head] * _LOG2_E - base)), 0.0)
            T.clear(joined)
            for s in T.serial(splits):
                for d in T.Parallel(_WIDTH):
                    joined[d] += T.if_then_else(shares[s] > 0, shares[s] * part[token, s, head, d], 0.0)
            for d in T.Parallel(_WIDTH):
                out[token, head, d] = joined[d] * factor[0]
            if T.get_thread_binding() == 0:
                lse[token, head] = T.if_then_else(seen, (base + T.log2(total[0])) * _LN_2, T.infinity("float32"))

    return combine_splits


def sparse_attention_tilelang(
    q_THD: Tensor,
    window: SelectedRows,
    compressed: SelectedRows | None,
    sink_H: Tensor,
    *,
    scale: float,
    tiles: TilelangTiles,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Attends from each token to its rows of one or two caches, in one softmax.

    Args:
        q_THD: (tokens, heads, 512) bfloat16, rotated, not scaled.
        window: Window cache and rows, `fp8_block64` in either dialect.
        compressed: Compressed cache and rows, or None. -1 is a hole; entries at and behind a length are ignored.
        sink_H: (heads,) float32 logits that enlarge the denominator only.
        scale: Multiplies q . row.
        tiles: From `attention_tiles`.
        num_splits: Parts of each token's rows; 1 for prefill.

    Returns:
        Output, and float32 natural log-sum-exp without the sink; zeros and +inf for a token that sees no row.
    """
    num_tokens, num_heads, _ = q_THD.shape
    out = torch.empty(q_THD.shape, dtype=torch.bfloat16, device=q_THD.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q_THD.device)
    if not num_tokens:
        return out, lse
    other = compressed or window
    part, part_lse = out, lse
    if num_splits > 1:
        part = torch.empty((num_tokens, num_splits, *q_THD.shape[1:]), dtype=torch.float32, device=q_THD.device)
        part_lse = torch.empty((num_tokens, num_splits, num_heads), dtype=torch.float32, device=q_THD.device)
    kernel = compiled(
        sparse_attention_program,
        num_heads,
        LatentPages.of(window.layout),
        window.slots_TK.shape[1],
        LatentPages.of(other.layout),
        compressed.slots_TK.shape[1] if compressed else 0,
        num_splits,
        tiles,
    )
    kernel(
        q_THD.contiguous(),
        window.pages.view(torch.uint32),
        window.slots_TK.contiguous(),
        window.lengths_T.contiguous(),
        other.pages.view(torch.uint32),
        other.slots_TK.contiguous(),
        other.lengths_T.contiguous(),
        sink_H,
        part,
        part_lse,
        scale,
    )
    if num_splits > 1:
        compiled(combine_program, num_heads, num_splits, tiles.threads)(part, part_lse, sink_H, out, lse)
    return out, lse
