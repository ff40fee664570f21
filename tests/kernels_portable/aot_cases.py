"""Every kernel in every configuration that a launcher chooses, at the sizes of the released models.

A case is a call of a launcher on tensors without memory; what it would launch is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from aot_archs import Arch, Dialect
from torch import Tensor

from halocline.hal.formats import CacheLayout, RowFormat, cache_layout
from halocline.kernels_portable.compressor_insert import MOST_ARRIVALS, StepRequests, insert_entries
from halocline.kernels_portable.expert_layer import ExpertMatrices, run_experts
from halocline.kernels_portable.expert_order import order_pairs
from halocline.kernels_portable.expert_sum import sum_experts
from halocline.kernels_portable.index_logits import index_logits, logit_tiles
from halocline.kernels_portable.index_query import prepare_index_query
from halocline.kernels_portable.index_select import select_entries
from halocline.kernels_portable.inverse_rope import rotate_back_and_quantize
from halocline.kernels_portable.linear_layer import StoredMatrices, multiply, project_outputs
from halocline.kernels_portable.quantize_activation import quantize_activation, round_activation
from halocline.kernels_portable.query_norm_rope import query_norm_rope
from halocline.kernels_portable.rms_norm import rms_norm
from halocline.kernels_portable.route_by_hash import route_by_hash
from halocline.kernels_portable.route_by_score import route_by_score
from halocline.kernels_portable.row_plan import plan_blocks, plan_window
from halocline.kernels_portable.row_reader import read_rows
from halocline.kernels_portable.row_writer import write_rows
from halocline.kernels_portable.sampling_pick import sample_tokens
from halocline.kernels_portable.shared_sum import shared_sum_
from halocline.kernels_portable.sparse_attention import (
    SelectedRows,
    attention_tiles,
    num_attention_splits,
    sparse_attention,
)
from halocline.kernels_portable.split_schedule import split_schedule
from halocline.kernels_portable.stream_head import collapse_streams
from halocline.kernels_portable.stream_mix import MANY_SPLITS, num_mix_splits
from halocline.kernels_portable.stream_read import read_streams
from halocline.kernels_portable.stream_write import write_streams
from halocline.kernels_portable.swiglu import swiglu
from halocline.kernels_portable.thin_fp8_gemm import thin_fp8_gemm
from halocline.kernels_portable.thin_gemm import thin_gemm
from halocline.kernels_portable.window_insert import insert_window

F32, BF16, I32, I64, U8 = torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8
EPS = 1e-6


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """int32 without memory."""
    return empty(*shape, dtype=I32)


TABLE = empty(1024, 64, dtype=F32)


def latents(row_format: RowFormat, page_rows: int, dialect: Dialect) -> tuple[Tensor, CacheLayout]:
    """Pages of latent rows."""
    layout = cache_layout("latent", row_format, width=512, rope_width=64, page_rows=page_rows, fp8_dialect=dialect)
    return empty(16, layout.page_stride, dtype=U8), layout


def keys(row_format: RowFormat, dialect: Dialect) -> tuple[Tensor, CacheLayout]:
    """Pages of index keys."""
    layout = cache_layout("index_key", row_format, width=128, rope_width=0, page_rows=64, fp8_dialect=dialect)
    return empty(16, layout.page_stride, dtype=U8), layout


Case = Callable[[Arch], object]
CASES: dict[str, Case] = {}


def case(name: str, function: Callable[..., object], *arguments: Any) -> None:
    """Adds a case; the architecture is the function's first argument."""
    assert name not in CASES
    CASES[name] = lambda arch: function(arch, *arguments)


# ---- norms and rows -----------------------------------------------------------------------------------------------


def _norms(arch: Arch, dtype: torch.dtype) -> None:
    for width in (512, 4096):
        rms_norm(empty(8, width, dtype=dtype), empty(width), eps=EPS)
    query_norm_rope(empty(8, 64, 512, dtype=dtype), ints(8), TABLE, eps=EPS)


def _plan(arch: Arch) -> None:
    pages = ints(8, 64)
    plan_window(
        ints(8), ints(8), pages, page_rows=256, slots_TK=ints(8, 128), lengths_T=ints(8), own_T=empty(8, dtype=I64)
    )
    plan_blocks(ints(8), ints(8), pages, ratio=4, page_rows=64, visible_T=ints(8), slots_TK=None)
    plan_blocks(ints(8), ints(8), pages, ratio=128, page_rows=2, visible_T=ints(8), slots_TK=ints(8, 8192))


def _window_insert(arch: Arch, row_format: RowFormat) -> None:
    pages, layout = latents(row_format, 256, arch.dialect)
    dtype = F32 if row_format is RowFormat.FLOAT32 else BF16
    insert_window(empty(8, 512, dtype=dtype), empty(512), ints(8), empty(8, dtype=I64), TABLE, pages, layout, eps=EPS)


def _rows(arch: Arch, kind: str, row_format: RowFormat) -> None:
    pages, layout = latents(row_format, 64, arch.dialect) if kind == "latent" else keys(row_format, arch.dialect)
    read_rows(pages, layout, ints(8), dtype=BF16)
    read_rows(pages, layout, empty(8, dtype=I64))
    write_rows(pages, layout, empty(8, dtype=I64), empty(8, layout.width, dtype=F32))


for _dtype in (BF16, F32):
    case(f"norms-{str(_dtype)[6:]}", _norms, _dtype)
case("plan", _plan)
for _format in (RowFormat.FP8_BLOCK64, RowFormat.BFLOAT16, RowFormat.FLOAT32):
    case(f"window_insert-{_format.value}", _window_insert, _format)
    case(f"rows-latent-{_format.value}", _rows, "latent", _format)
for _format in (RowFormat.FP8_ROW, RowFormat.FP4_GROUP32):
    case(f"rows-key-{_format.value}", _rows, "key", _format)

# ---- attention ----------------------------------------------------------------------------------------------------


def _attention(arch: Arch, row_format: RowFormat, heads: int, tokens: int, entries: int) -> None:
    dtype = F32 if row_format is RowFormat.FLOAT32 else BF16
    tiles = attention_tiles(arch.target, heads, dtype)
    splits = num_attention_splits(
        arch.target, tiles, num_tokens=tokens, num_heads=heads, num_entries=128 + entries, batch_invariant=False
    )
    window = SelectedRows(*latents(row_format, 256, arch.dialect), ints(tokens, 128), ints(tokens))
    rows = SelectedRows(*latents(row_format, 64, arch.dialect), ints(tokens, entries), ints(tokens))
    sparse_attention(
        empty(tokens, heads, 512, dtype=dtype), window, rows if entries else None, empty(heads, dtype=F32), scale=0.044,
        tiles=tiles, num_splits=splits,
    )  # fmt: skip


for _heads, _entries in ((64, 512), (128, 1024), (8, 512), (64, 0)):
    _suffix = "" if _entries else "-window"
    case(f"attention-fp8_block64-h{_heads}-decode{_suffix}", _attention, RowFormat.FP8_BLOCK64, _heads, 4, _entries)
case("attention-fp8_block64-h64-prefill", _attention, RowFormat.FP8_BLOCK64, 64, 4096, 512)
case("attention-bfloat16-h64-prefill", _attention, RowFormat.BFLOAT16, 64, 4096, 512)
case("attention-float32-h64-decode", _attention, RowFormat.FLOAT32, 64, 4, 512)

# ---- compressor and indexer ---------------------------------------------------------------------------------------


def _compressor(arch: Arch, kind: str, row_format: RowFormat, ratio: int) -> None:
    width = 512 if kind == "latent" else 128
    pages, layout = (
        latents(row_format, 256 // ratio, arch.dialect) if kind == "latent" else keys(row_format, arch.dialect)
    )
    lanes = width * (2 if ratio == 4 else 1)
    ring = 8 if ratio == 4 else 128
    for tokens, most_tokens in ((8, 1), (8, 8), (64, 1), (4096, 4096)):
        step = StepRequests(
            positions_T=ints(tokens), requests_T=ints(tokens), query_starts_R1=ints(9), seqlens_R=ints(8),
            state_slots_R=ints(8), token_pages_RP=ints(8, 64), most_tokens=most_tokens,
            arrivals_T=ints(MOST_ARRIVALS) if arch.target.wave_size == 32 else None,
        )  # fmt: skip
        projected = empty(tokens, 2 * lanes, dtype=F32)
        insert_entries(
            step, *projected.chunk(2, dim=1), empty(ratio, lanes, dtype=F32), empty(width), TABLE,
            empty(8, ring, 2, lanes, dtype=F32), pages, layout, ratio=ratio, transform=kind != "latent", eps=EPS,
        )  # fmt: skip


def _index_query(arch: Arch, rounding: Any, dtype: torch.dtype) -> None:
    q, weights = empty(8, 64, 128, dtype=dtype), empty(8, 64, dtype=dtype)
    prepare_index_query(q, weights, ints(8), TABLE, rounding=rounding, fp8_dialect=arch.dialect)


def _index_logits(arch: Arch, row_format: RowFormat, query: str) -> None:
    dtype = {"codes": arch.fp8, "bfloat16": BF16, "float32": F32}[query]
    pages, layout = keys(row_format, arch.dialect)
    index_logits(
        empty(8, 64, 128, dtype=dtype), empty(8, 64, dtype=F32), ints(8), ints(8), ints(8, 64), pages, layout,
        num_entries=4096, tiles=logit_tiles(arch.target, dtype),
    )  # fmt: skip


def _index_select(arch: Arch, entries: int, kept: int) -> None:
    select_entries(empty(8, entries, dtype=F32), ints(8), ints(8), ints(8, 64), num_kept=kept, page_rows=64)


for _format in (RowFormat.FP8_BLOCK64, RowFormat.FLOAT32):
    for _ratio in (4, 128):
        case(f"compressor-latent-{_ratio}-{_format.value}", _compressor, "latent", _format, _ratio)
for _format in (RowFormat.FP8_ROW, RowFormat.FP4_GROUP32, RowFormat.FLOAT32):
    case(f"compressor-key-4-{_format.value}", _compressor, "key", _format, 4)
for _rounding in ("none", "fp4_group32", "fp8_row"):
    case(f"index_query-{_rounding}", _index_query, _rounding, F32 if _rounding == "none" else BF16)
case("index_logits-fp8_row-codes", _index_logits, RowFormat.FP8_ROW, "codes")
case("index_logits-fp8_row-bfloat16", _index_logits, RowFormat.FP8_ROW, "bfloat16")
case("index_logits-fp4_group32-bfloat16", _index_logits, RowFormat.FP4_GROUP32, "bfloat16")
case("index_logits-float32-float32", _index_logits, RowFormat.FLOAT32, "float32")
case("index_select-2048", _index_select, 2048, 512)
case("index_select-65536", _index_select, 65536, 1024)

# ---- streams, products, experts -----------------------------------------------------------------------------------


def _streams(arch: Arch, dtype: torch.dtype, tokens: int) -> None:
    hidden = 4096
    splits = num_mix_splits(arch.target, num_tokens=tokens, lanes=4 * hidden, batch_invariant=False, most=MANY_SPLITS)
    streams = empty(tokens, 4, hidden, dtype=dtype)
    read_streams(
        streams, empty(24, 4 * hidden, dtype=F32), empty(24, dtype=F32), empty(3, dtype=F32), norm_eps=EPS, hc_eps=EPS,
        sinkhorn_iterations=20, num_splits=splits,
    )  # fmt: skip
    write_streams(
        empty(tokens, hidden, dtype=dtype), streams, empty(tokens, 4, dtype=F32), empty(tokens, 4, 4, dtype=F32)
    )
    collapse_streams(
        streams, empty(4, 4 * hidden, dtype=F32), empty(4, dtype=F32), empty(1, dtype=F32), norm_eps=EPS, hc_eps=EPS,
        num_splits=splits,
    )  # fmt: skip


def _matrices(arch: Arch, kind: str, n: int, k: int, groups: int = 1) -> StoredMatrices:
    if kind != "fp8":
        return StoredMatrices(format="plain", data=empty(groups, n, k, dtype=F32 if kind == "float32" else BF16))
    scale = empty(groups, n // 128, k // 128, dtype=F32)
    codes = empty(groups, n, k, dtype=arch.fp8)
    return StoredMatrices(format="fp8", data=codes, scale=scale, fp8_dialect=arch.dialect)


def _linear(
    arch: Arch, kind: str, rows: int, rounds: bool, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> None:
    multiply(
        empty(rows, 4096, dtype=dtype), _matrices(arch, kind, 4096, 4096), rounds_input=rounds,
        out_dtype=out_dtype or dtype, target=arch.target, batch_invariant=False,
    )  # fmt: skip


def _thin(arch: Arch, n: int) -> None:
    for dtype in (BF16, F32):
        thin_gemm(empty(2, 4096, dtype=dtype), empty(n, 4096, dtype=dtype), out_dtype=F32)


def _thin_fp8(arch: Arch, n: int, k: int) -> None:
    scale = empty(1, n // 128, k // 128, dtype=F32)
    thin_fp8_gemm(empty(1, k), empty(1, n, k, dtype=arch.fp8), scale, out_dtype=BF16)


def _rounded_outputs(arch: Arch) -> None:
    for tokens in (1, 8):
        project_outputs(
            empty(tokens, 64, 512), ints(tokens), TABLE, _matrices(arch, "fp8", 1024, 4096, 8), rounds_input=True,
            target=arch.target, batch_invariant=False,
        )  # fmt: skip


def _output(arch: Arch, kind: str, rounds: bool) -> None:
    weight = _matrices(arch, kind, 1024, 4096, groups=8)
    project_outputs(
        empty(32, 64, 512), ints(32), TABLE, weight, rounds_input=rounds, target=arch.target, batch_invariant=False
    )


def _experts(arch: Arch, kind: str, tokens: int, rounds: bool, dtype: torch.dtype) -> None:
    hidden, width, experts = 4096, 2048, 256

    def stack(n: int, k: int) -> ExpertMatrices:
        if kind == "plain":
            return ExpertMatrices(format="plain", data=empty(experts, n, k, dtype=dtype))
        if kind == "fp8":
            matrices = _matrices(arch, "fp8", n, k, experts)
            return ExpertMatrices(format="fp8", data=matrices.data, scale=matrices.scale, fp8_dialect=arch.dialect)
        group = 32 if kind == "mxfp4" else 16
        scale = empty(experts, n, k // group, dtype=U8)
        unit = empty(experts, dtype=F32) if kind == "nvfp4" else None
        return ExpertMatrices(format="fp4", data=empty(experts, n, k // 2, dtype=U8), scale=scale, global_scale=unit)

    run_experts(
        empty(tokens, hidden, dtype=dtype), ints(tokens, 6), empty(tokens, 6, dtype=F32), stack(2 * width, hidden),
        stack(hidden, width), limit=10.0, rounds_input=rounds, target=arch.target, batch_invariant=False,
    )  # fmt: skip


def _pairs(arch: Arch, experts: int, tokens: int) -> None:
    if arch.serves_nvidia_libraries:
        order_pairs(ints(tokens, 6), empty(tokens, 6, dtype=F32), num_experts=experts)
    sum_experts(empty(6 * tokens, 4096), ints(tokens, 6), out_dtype=BF16, places_P=ints(6 * tokens))


def _scales_by_group(arch: Arch) -> None:
    quantize_activation(empty(8, 4096), fp8_dialect=arch.dialect, scale_order="groups")
    rotate_back_and_quantize(empty(8, 64, 512), ints(8), TABLE, fp8_dialect=arch.dialect, scale_order="groups")


def _schedule(arch: Arch) -> None:
    for other in (None, ints(128)) if arch.serves_nvidia_libraries else ():
        split_schedule(ints(128), other, num_parts=arch.target.num_processors)


def _shared_sum(arch: Arch) -> None:
    for rank, dtype in enumerate((BF16, F32)) if arch.serves_nvidia_libraries else ():
        shared_sum_(empty(1, 4096, dtype=dtype), empty(2, dtype=I64), ints(128), rank=rank, capacity=1 << 20)


def _routers(arch: Arch) -> None:
    for experts in (256, 384):
        route_by_score(empty(8, experts, dtype=F32), empty(experts, dtype=F32), num_chosen=6, scale=1.5)
    for dtype in (I32, I64):
        route_by_hash(empty(8, 256, dtype=F32), ints(8), empty(1024, 6, dtype=dtype), scale=1.5)


def _sample(arch: Arch) -> None:
    floats, longs = empty(8, dtype=F32), empty(8, dtype=I64)
    sample_tokens(empty(8, 129280, dtype=F32), floats, ints(8), floats, floats, longs, longs)


for _dtype in (BF16, F32):
    for _tokens in (4, 128, 8192):
        case(f"streams-{str(_dtype)[6:]}-t{_tokens}", _streams, _dtype, _tokens)
for _m in (1, 32, 128, 8192):
    case(f"linear-fp8-m{_m}", _linear, "fp8", _m, True, BF16)
    case(f"linear-bfloat16-m{_m}", _linear, "bfloat16", _m, False, BF16)
case("linear-fp8-float32-result", _linear, "fp8", 32, True, BF16, F32)
case("linear-fp8-plain-input", _linear, "fp8", 32, False, BF16)
case("linear-float32", _linear, "float32", 16, False, F32)
case("linear-fp8-float32-input", _linear, "fp8", 16, False, F32)
for _n in (64, 256, 2048):
    case(f"thin-n{_n}", _thin, _n)
for _n, _k in ((512, 4096), (4096, 8192), (32768, 1024)):
    case(f"thin-fp8-n{_n}", _thin_fp8, _n, _k)
case("output-rounded", _rounded_outputs)
case("output-fp8", _output, "fp8", True)
case("output-bfloat16", _output, "bfloat16", False)
for _tokens in (1, 1024, 8192):
    case(f"experts-mxfp4-t{_tokens}", _experts, "mxfp4", _tokens, True, BF16)
    case(f"experts-fp8-t{_tokens}", _experts, "fp8", _tokens, True, BF16)
for _kind in ("nvfp4", "plain"):
    case(f"experts-{_kind}", _experts, _kind, 1024, False, BF16)
case("experts-fp8-plain-input", _experts, "fp8", 1, False, BF16)
case("experts-mxfp4-float32", _experts, "mxfp4", 1, False, F32)
case("experts-plain-float32", _experts, "plain", 1, False, F32)
for _experts_held, _tokens in ((2, 1), (256, 1), (256, 4096), (384, 128)):
    case(f"pairs-e{_experts_held}-t{_tokens}", _pairs, _experts_held, _tokens)
case("scales-by-group", _scales_by_group)
case("schedule", _schedule)
case("shared-sum", _shared_sum)
case("routers", _routers)
case("round_activation", lambda arch: round_activation(empty(8, 4096)))
case("swiglu", lambda arch: swiglu(empty(8, 4096), limit=10.0))
case("sample", _sample)
