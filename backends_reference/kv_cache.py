"""Reference caches: every row format of `CacheLayout`, packed and unpacked byte by byte.

A page is its rows' data, then its rows' scales. N rows, D lanes, P rows of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halocline.backends_reference.norm import root_mean_square_scale
from halocline.backends_reference.rope import rotate_tail
from halocline.hal import codecs
from halocline.hal.errors import OutOfPagesError, ShapeError
from halocline.hal.formats import CacheLayout, RowFormat
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.kv_cache import CacheHandle, allocate, insert_window, read_rows, write_rows
from halocline.hal.ops.rope import RopeTable

__all__ = [
    "allocate_reference",
    "insert_window_reference",
    "pack_rows",
    "read_rows_reference",
    "round_rows",
    "unpack_rows",
    "write_rows_reference",
]

_LATENT_GROUP = 64
_KEY_GROUP = 32


def _data_bytes(layout: CacheLayout) -> int:
    """Bytes of a row in the data region of its page; the rest of `row_bytes` lies in the scale region."""
    nope = layout.width - layout.rope_width
    return {
        RowFormat.FLOAT32: 4 * layout.width,
        RowFormat.BFLOAT16: 2 * layout.width,
        RowFormat.FP8_BLOCK64: nope + 2 * layout.rope_width,
        RowFormat.FP8_ROW: layout.width,
        RowFormat.FP4_GROUP32: layout.width // 2,
    }[layout.format]


def pack_rows(layout: CacheLayout, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows and returns their bytes: data (N, data bytes) and scales (N, scale bytes), uint8."""
    rows = rows_ND.detach().float()
    none = torch.empty((rows.shape[0], 0), dtype=torch.uint8, device=rows.device)
    if layout.format is RowFormat.FLOAT32:
        return rows.contiguous().view(torch.uint8), none
    if layout.format is RowFormat.BFLOAT16:
        return rows.bfloat16().view(torch.uint8), none
    if layout.format is RowFormat.FP8_ROW:
        codes, scale_N = codecs.quantize_fp8_row(rows)
        steps = scale_N[:, None] * (2.0 if _is_fnuz(layout) else 1.0)
        return _in_dialect(layout, codes), steps.view(torch.uint8)
    if layout.format is RowFormat.FP4_GROUP32:
        return codecs.quantize_fp4_groups(rows, _KEY_GROUP)
    nope, tail = rows.split((layout.width - layout.rope_width, layout.rope_width), dim=1)
    codes, scales = codecs.quantize_fp8_groups(nope.contiguous(), _LATENT_GROUP)
    if _is_fnuz(layout):
        scales = scales.clamp_max(254) + 1  # 255 is NaN and stays it
    data = torch.cat((_in_dialect(layout, codes), tail.bfloat16().contiguous().view(torch.uint8)), dim=1)
    unused = layout.row_bytes - data.shape[1] - scales.shape[1]
    return data, torch.nn.functional.pad(scales, (0, unused))


def _is_fnuz(layout: CacheLayout) -> bool:
    return layout.fp8_dialect == "fnuz"


def _in_dialect(layout: CacheLayout, codes: Tensor) -> Tensor:
    """Bytes of OCP codes. The same byte means half as much in FNUZ, where scales double; -0 has no byte there."""
    code_bytes = codes.view(torch.uint8)
    return code_bytes.masked_fill(code_bytes == 0x80, 0) if _is_fnuz(layout) else code_bytes


def unpack_rows(layout: CacheLayout, data: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of packed rows (N, D)."""
    dialect: codecs.Dialect = "fnuz" if _is_fnuz(layout) else "ocp"
    if layout.format is RowFormat.FLOAT32:
        return data.contiguous().view(torch.float32)
    if layout.format is RowFormat.BFLOAT16:
        return data.contiguous().view(torch.bfloat16).float()
    if layout.format is RowFormat.FP8_ROW:
        values: Tensor = codecs.decode_e4m3(data, dialect=dialect)
        return values * scales.contiguous().view(torch.float32)
    if layout.format is RowFormat.FP4_GROUP32:
        values = codecs.decode_e2m1(data).unflatten(1, (-1, _KEY_GROUP))
        return (values * codecs.decode_ue8m0(scales)[..., None]).flatten(1)
    nope = layout.width - layout.rope_width
    values = codecs.decode_e4m3(data[:, :nope], dialect=dialect).unflatten(1, (-1, _LATENT_GROUP))
    steps = codecs.decode_ue8m0(scales[:, : nope // _LATENT_GROUP])
    tail = data[:, nope:].contiguous().view(torch.bfloat16).float()
    return torch.cat(((values * steps[..., None]).flatten(1), tail), dim=1)


def round_rows(layout: CacheLayout, rows_ND: Tensor) -> Tensor:
    """The round trip of a row format, straight-through for gradients, in float32."""
    rows = rows_ND.float()
    if layout.format is RowFormat.FLOAT32:
        return rows
    if layout.format is RowFormat.BFLOAT16:
        return rows.bfloat16().float()
    if layout.format is RowFormat.FP8_ROW:
        return codecs.round_trip_fp8_row(rows)
    if layout.format is RowFormat.FP4_GROUP32:
        return codecs.round_trip_fp4(rows, _KEY_GROUP)
    nope, tail = rows.split((layout.width - layout.rope_width, layout.rope_width), dim=1)
    return torch.cat((codecs.round_trip_fp8(nope, _LATENT_GROUP), tail.bfloat16().float()), dim=1)


def _regions(cache: CacheHandle) -> tuple[Tensor, Tensor]:
    """Views of all pages: data (pages, P, data bytes) and scales (pages, P, scale bytes)."""
    layout = cache.layout
    data = _data_bytes(layout)
    end = layout.page_rows * data
    scale = layout.row_bytes - data
    return (
        cache.pages[:, :end].unflatten(1, (layout.page_rows, data)),
        cache.pages[:, end : end + layout.page_rows * scale].unflatten(1, (layout.page_rows, scale)),
    )


def _check_slots(cache: CacheHandle, slots_N: Tensor) -> Tensor:
    slots = slots_N.long()
    if slots.numel() and int(slots.max()) >= cache.num_pages * cache.layout.page_rows:
        raise ShapeError(
            f"slot {int(slots.max())} lies behind a cache of {cache.num_pages} pages of {cache.layout.page_rows} rows"
        )
    return slots


@implements(allocate)
def allocate_reference(layout: CacheLayout, num_pages: int, *, device: str) -> CacheHandle:
    """See the contract."""
    if layout.storage == "autograd":
        pages = torch.zeros((num_pages * layout.page_rows, layout.width), device=device)
        return CacheHandle(layout=layout, num_pages=num_pages, pages=pages)
    try:
        pages = torch.zeros((num_pages, layout.page_stride), dtype=torch.uint8, device=device)
    except RuntimeError as error:
        needed = num_pages * layout.page_stride
        raise OutOfPagesError(f"a cache of {num_pages} pages ({needed} bytes) does not fit on {device}") from error
    return CacheHandle(layout=layout, num_pages=num_pages, pages=pages)


@implements(read_rows)
def read_rows_reference(cache: CacheHandle, slots_N: Tensor) -> Tensor:
    """See the contract."""
    layout, slots = cache.layout, _check_slots(cache, slots_N)
    hole_N = slots < 0
    slots = slots.clamp_min(0)
    if layout.storage == "autograd":
        rows_ND = cache.pages.index_select(0, slots)
    else:
        data, scales = _regions(cache)
        at = (slots // layout.page_rows, slots % layout.page_rows)
        rows_ND = unpack_rows(layout, data[at], scales[at])
    return rows_ND.masked_fill(hole_N[:, None], 0.0)


@implements(write_rows)
def write_rows_reference(cache: CacheHandle, slots_N: Tensor, rows_ND: Tensor) -> None:
    """See the contract."""
    layout, slots = cache.layout, _check_slots(cache, slots_N)
    if rows_ND.shape != (slots.shape[0], layout.width):
        raise ShapeError(f"rows of shape {tuple(rows_ND.shape)} for {slots.shape[0]} slots of {layout.width} lanes")
    kept_N = (slots >= 0).nonzero()[:, 0]
    slots, rows_ND = slots[kept_N], rows_ND[kept_N]
    if layout.storage == "autograd":
        cache.pages = cache.pages.index_put((slots,), round_rows(layout, rows_ND))
        return
    data, scales = _regions(cache)
    at = (slots // layout.page_rows, slots % layout.page_rows)
    data[at], scales[at] = pack_rows(layout, rows_ND)


@implements(insert_window)
def insert_window_reference(
    plan: AttentionPlan,
    kv_TD: Tensor,
    norm_weight_D: Tensor,
    rope: RopeTable,
    cache: CacheHandle,
    *,
    eps: float,
) -> None:
    """See the contract."""
    if kv_TD.shape[1:] != (cache.layout.width,) or norm_weight_D.shape != (cache.layout.width,):
        raise ShapeError(
            f"latents {tuple(kv_TD.shape)} and gain {tuple(norm_weight_D.shape)} for rows of {cache.layout.width}"
        )
    normed_TD = kv_TD.float() * root_mean_square_scale(kv_TD, eps) * norm_weight_D.float()
    latent_TD = rotate_tail(normed_TD, rope, plan.batch.positions_T).to(kv_TD.dtype)
    write_rows_reference(cache, plan.window_slot_mapping_T, latent_TD)
