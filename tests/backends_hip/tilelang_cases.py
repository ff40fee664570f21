"""Every tilelang program in the configurations that its launcher chooses at the sizes of the released models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halocline.hal.formats import RowFormat, cache_layout
from halocline.kernels_portable.stream_mix import num_mix_splits
from halocline.kernels_portable.target import Target
from halocline.kernels_portable.tilelang_fp8_gemm import fp8_gemm_program, row_tile
from halocline.kernels_portable.tilelang_index_logits import index_logits_program
from halocline.kernels_portable.tilelang_program import num_threads
from halocline.kernels_portable.tilelang_sparse_attention import (
    LatentPages,
    attention_tiles,
    combine_program,
    sparse_attention_program,
)
from halocline.kernels_portable.tilelang_streams import (
    coefficients_program,
    mix_program,
    site_input_program,
    write_program,
)

__all__ = ["CASES"]

Case = Callable[[Target, bool], Any]
CASES: dict[str, Case] = {}
HIDDEN, STREAMS, EPS = 4096, 4, 1e-6


def _pages(rows: int, fnuz: bool) -> LatentPages:
    dialect = "fnuz" if fnuz else "ocp"
    layout = cache_layout(
        "latent", RowFormat.FP8_BLOCK64, width=512, rope_width=64, page_rows=rows, fp8_dialect=dialect
    )
    return LatentPages.of(layout)


def _attention(heads: int, entries: int, splits: int) -> Case:
    def program(target: Target, fnuz: bool) -> Any:
        tiles = attention_tiles(target, heads)
        return sparse_attention_program(heads, _pages(256, fnuz), 128, _pages(64, fnuz), entries, splits, tiles)

    return program


def _mix(tokens: int) -> Case:
    def program(target: Target, fnuz: bool) -> Any:
        splits = num_mix_splits(target, num_tokens=tokens, lanes=STREAMS * HIDDEN, batch_invariant=False)
        return mix_program(24, STREAMS * HIDDEN, splits, num_threads(target.wave_size, 2 * target.wave_size))

    return program


def _product(n: int, k: int, rows: int) -> Case:
    def program(target: Target, fnuz: bool) -> Any:
        element = "float8_e4m3fnuz" if fnuz else "float8_e4m3fn"
        return fp8_gemm_program(n, k, element, "bfloat16", row_tile(rows), num_threads(target.wave_size))

    return program


CASES["sparse_attention-h64-decode"] = _attention(64, 512, 8)
CASES["sparse_attention-h64-prefill"] = _attention(64, 512, 1)
CASES["sparse_attention-h8-decode"] = _attention(8, 512, 8)
CASES["sparse_attention-h128-decode"] = _attention(128, 1024, 8)
CASES["sparse_attention-h64-window"] = _attention(64, 0, 2)
CASES["combine_splits-h64-s8"] = lambda target, _: combine_program(64, 8, attention_tiles(target, 64).threads)
for _query in ("codes", "bfloat16"):
    CASES[f"index_logits-{_query}"] = lambda target, fnuz, query=_query: index_logits_program(
        64, 128, 64, fnuz, query, num_threads(target.wave_size)
    )
for _rows in (1, 32, 4096):
    CASES[f"fp8_gemm-m{_rows}"] = _product(4096, 4096, _rows)
CASES["fp8_gemm-m32-narrow"] = _product(576, 1536, 32)
for _tokens in (4, 4096):
    CASES[f"mix_streams-t{_tokens}"] = _mix(_tokens)
CASES["stream_coefficients"] = lambda target, _: coefficients_program(
    STREAMS, STREAMS * HIDDEN, 8, 20, EPS, EPS, target.wave_size
)
CASES["site_input"] = lambda target, _: site_input_program(STREAMS, HIDDEN, num_threads(target.wave_size))
CASES["write_streams"] = lambda target, _: write_program(STREAMS, HIDDEN, num_threads(target.wave_size))
