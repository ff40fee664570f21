"""Lowered tilelang programs, emulated on the CPU in waves of 64 lanes, against formulas. Small shapes, all endings.

Each check is given an architecture and gives the relative error (norm of the difference over the norm) of an output.
Memory is filled with NaN before, so that what a program leaves out or reads too early is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from host_runner import emulated
from tilelang_sources import ARCHS
from torch import Tensor

from halocline.backends_reference.hyper_connection import read_reference, write_reference
from halocline.backends_reference.kv_cache import allocate_reference, read_rows_reference, write_rows_reference
from halocline.hal.codecs import decode_e4m3
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.kernels_portable.tilelang_fp8_gemm import fp8_gemm_program, row_tile
from halocline.kernels_portable.tilelang_index_logits import index_logits_program
from halocline.kernels_portable.tilelang_program import lower, num_threads
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

__all__ = ["EMULATED_ARCHS", "MOST_ERROR", "checks"]

EMULATED_ARCHS = ("gfx942", "gfx950")
MOST_ERROR = {"bfloat16": 4e-3, "float32": 1e-5}  # one rounding of the result; sums in another order
Result = tuple[str, str, float]  # what, type of the result, error
NAN = math.nan


def _run(arch: str, program: Any, grid: tuple[int, int, int], **arguments: Any) -> None:
    facts = ARCHS[arch]
    emulated(lower(program, facts.compiler).source, fnuz=facts.fnuz)(grid, **arguments)


def _error(found: Tensor, expected: Tensor) -> float:
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype)


def _pages(kind: str, rows: int, num_pages: int, dialect: str, seed: int) -> CacheHandle:
    """Filled pages; what no row uses holds bytes that read as NaN."""
    latent = kind == "latent"
    layout = cache_layout(
        "latent" if latent else "index_key",
        RowFormat.FP8_BLOCK64 if latent else RowFormat.FP8_ROW,
        width=512 if latent else 64,
        rope_width=64 if latent else 0,
        page_rows=rows,
        fp8_dialect="fnuz" if dialect == "fnuz" else "ocp",
    )
    cache = allocate_reference(layout, num_pages, device="cpu")
    cache.pages.fill_(0xFF)
    values = torch.randn(num_pages * rows, layout.width, generator=torch.Generator().manual_seed(seed))
    write_rows_reference(cache, torch.arange(num_pages * rows), values)
    return cache


def _attention(arch: str, heads: int, entries: int, splits: int) -> Iterator[Result]:
    facts, gen = ARCHS[arch], torch.Generator().manual_seed(heads)
    dialect = "fnuz" if facts.fnuz else "ocp"
    window, other = _pages("latent", 64, 2, dialect, 1), _pages("latent", 32, 3, dialect, 2)
    window_slots = torch.randint(0, 128, (2, 64), generator=gen, dtype=torch.int32)
    window_slots[:, 5], window_lengths = -1, torch.tensor([37, 64], dtype=torch.int32)
    slots, lengths = window_slots, window_lengths
    if entries:
        slots = torch.randint(0, 96, (2, entries), generator=gen, dtype=torch.int32)
        slots[0, 0], lengths = -1, torch.tensor([entries - 3, 0], dtype=torch.int32)
    else:
        other = window
    q = torch.randn(2, heads, 512, generator=gen).bfloat16()
    sink, scale = torch.randn(heads, generator=gen), 512**-0.5
    tiles = attention_tiles(facts.target, heads)
    layouts = LatentPages.of(window.layout), LatentPages.of(other.layout)
    out, lse = _empty(2, heads, 512, dtype=torch.bfloat16), _empty(2, heads)
    parts = (out, lse) if splits == 1 else (_empty(2, splits, heads, 512), _empty(2, splits, heads))
    _run(
        arch, sparse_attention_program(heads, layouts[0], 64, layouts[1], entries, splits, tiles),
        (2, -(-heads // tiles.heads), splits), q=q, window_words=window.pages, window_slots=window_slots,
        window_lengths=window_lengths, words=other.pages, slots=slots, lengths=lengths, sink=sink, out=parts[0],
        lse=parts[1], scale=scale, tokens=2, window_pages=window.num_pages, pages=other.num_pages,
    )  # fmt: skip
    if splits > 1:
        program = combine_program(heads, splits, tiles.threads)
        _run(arch, program, (2, heads, 1), part=parts[0], part_lse=parts[1], sink=sink, out=out, lse=lse, tokens=2)
    expected_out, expected_lse = torch.empty(2, heads, 512), torch.empty(2, heads)
    for token in range(2):
        seen = [(window, window_slots[token, : window_lengths[token]])]
        seen += [(other, slots[token, : lengths[token]])] if entries else []
        rows = torch.cat([read_rows_reference(cache, s[s >= 0].long()) for cache, s in seen]).bfloat16().float()
        scores = q[token].float() @ rows.T * scale
        expected_lse[token] = torch.logsumexp(scores, -1)
        whole = torch.logaddexp(expected_lse[token], sink)
        expected_out[token] = torch.exp(scores - whole[:, None]) @ rows
    name = f"sparse_attention heads={heads} entries={entries} splits={splits}"
    yield name, "bfloat16", _error(out, expected_out)
    yield f"{name} lse", "float32", _error(lse, expected_lse)


def _logits(arch: str, query: str) -> Iterator[Result]:
    facts, gen = ARCHS[arch], torch.Generator().manual_seed(3)
    dialect = "fnuz" if facts.fnuz else "ocp"
    cache = _pages("key", 64, 6, dialect, 4)
    values = torch.randn(3, 20, 64, generator=gen)
    kind = torch.float8_e4m3fnuz if facts.fnuz else torch.float8_e4m3fn
    q = values.to(kind) if query == "codes" else values.bfloat16()
    weights = torch.randn(3, 20, generator=gen)
    visible = torch.tensor([70, 130, 0], dtype=torch.int32)
    request_of = torch.tensor([0, 1, -1], dtype=torch.int32)
    token_pages = torch.tensor([[3, 1, -1], [5, 0, 2]], dtype=torch.int32)
    out = torch.full((3, 160), 7.5)
    program = index_logits_program(20, 64, 64, facts.fnuz, "codes" if query == "codes" else "bfloat16", num_threads(64))
    _run(
        arch, program, (3, 3, 1), q=q, weights=weights, visible=visible, request_of=request_of, token_pages=token_pages,
        cache=cache.pages, out=out, tokens=3, requests=2, pages_of=3, pages=6, entries=160,
    )  # fmt: skip
    for token in range(2):
        places = torch.arange(int(visible[token]))
        keys = read_rows_reference(cache, token_pages[token][places // 64].long() * 64 + places % 64)
        expected = (weights[token, :, None] * (q[token].float() @ keys.T).relu()).sum(0)
        yield f"index_logits {query} token={token}", "float32", _error(out[token, : len(places)], expected)
        assert bool((out[token, len(places) :] == 7.5).all()), "written behind the visible entries"


def _product(arch: str, rows: int, n: int, k: int) -> Iterator[Result]:
    facts, gen = ARCHS[arch], torch.Generator().manual_seed(rows)
    kind, dialect = (torch.float8_e4m3fnuz, "fnuz") if facts.fnuz else (torch.float8_e4m3fn, "ocp")
    x, weight = (torch.randn(count, k, generator=gen).to(kind) for count in (rows, n))
    blocks = -(-k // 128)
    x_scale = torch.rand(rows, blocks, generator=gen) + 0.5
    weight_scale = torch.rand(-(-n // 128), blocks, generator=gen) + 0.5
    out, tile = _empty(rows, n, dtype=torch.bfloat16), row_tile(rows)
    element = "float8_e4m3fnuz" if facts.fnuz else "float8_e4m3fn"
    _run(
        arch, fp8_gemm_program(n, k, element, "bfloat16", tile, num_threads(64)), (-(-n // 128), -(-rows // tile), 1),
        x=x, x_scale=x_scale, weight=weight, weight_scale=weight_scale, out=out, num_rows=rows,
    )  # fmt: skip
    wide_x = decode_e4m3(x, dialect=dialect) * x_scale.repeat_interleave(128, 1)[:, :k]
    by_row = weight_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    expected = wide_x @ (decode_e4m3(weight, dialect=dialect) * by_row).T
    yield f"fp8_gemm {rows} x {n} x {k}", "bfloat16", _error(out, expected)


def _streams(arch: str) -> Iterator[Result]:
    n, hidden, tokens, splits, rounds, gen = 4, 256, 19, 2, 5, torch.Generator().manual_seed(5)
    lanes, rows = n * hidden, (2 + n) * n
    streams = torch.randn(tokens, n, hidden, generator=gen).bfloat16()
    matrix = torch.randn(rows, lanes, generator=gen) * lanes**-0.5
    base, gain = torch.randn(rows, generator=gen), torch.rand(3, generator=gen) + 0.5
    logits, squares = _empty(splits, tokens, rows), _empty(splits, tokens)
    _run(
        arch, mix_program(rows, lanes, splits, 128), (2, splits, 1), streams=streams, matrix=matrix, logits=logits,
        squares=squares, tokens=tokens,
    )  # fmt: skip
    yield "mix_streams", "float32", _error(logits.sum(0), streams.double().flatten(1) @ matrix.double().T)
    pre, post, comb = _empty(tokens, n), _empty(tokens, n), _empty(tokens, n, n)
    _run(
        arch, coefficients_program(n, lanes, splits, rounds, 1e-6, 1e-3, 64), (1, 1, 1), logits=logits, squares=squares,
        base=base, gain=gain, pre=pre, post=post, comb=comb, tokens=tokens,
    )  # fmt: skip
    expected = read_reference(streams, matrix, base, gain, norm_eps=1e-6, hc_eps=1e-3, sinkhorn_iterations=rounds)
    yield "stream_coefficients post", "float32", _error(post, expected.post_TN)
    yield "stream_coefficients comb", "float32", _error(comb, expected.comb_TNN)
    x = _empty(tokens, hidden, dtype=torch.bfloat16)
    _run(arch, site_input_program(n, hidden, 256), (tokens, 1, 1), streams=streams, pre=pre, x=x, tokens=tokens)
    yield "site_input", "bfloat16", _error(x, expected.x_TD)
    y, out = torch.randn(tokens, hidden, generator=gen).bfloat16(), torch.full_like(streams, NAN)
    _run(
        arch, write_program(n, hidden, 256), (tokens, 1, 1), y=y, streams=streams, post=post, comb=comb, out=out,
        tokens=tokens,
    )  # fmt: skip
    yield "write_streams", "bfloat16", _error(out, write_reference(y, streams, post, comb))


def checks() -> list[Callable[[str], Iterator[Result]]]:
    """Every check; each takes the name of an architecture."""
    return [
        *(lambda arch, case=case: _attention(arch, *case) for case in ((8, 40, 1), (20, 40, 3), (20, 0, 2))),
        *(lambda arch, query=query: _logits(arch, query) for query in ("codes", "bfloat16")),
        *(lambda arch, size=size: _product(arch, *size) for size in ((5, 144, 272), (40, 256, 256))),
        _streams,
    ]
