"""Reads and writes of cached rows by the portable kernels. N rows, T tokens, D lanes.

Slots are not compared with the cache's size: that would wait for the device in every call.
"""

from __future__ import annotations

from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.kv_cache import CacheHandle, insert_window, read_rows, write_rows
from halocline.hal.ops.rope import RopeTable
from halocline.kernels_portable import row_reader, row_writer, window_insert

__all__ = ["check_latents", "insert_window_triton", "read_rows_triton", "write_rows_triton"]


@implements(read_rows)
def read_rows_triton(cache: CacheHandle, slots_N: Tensor) -> Tensor:
    """See the contract."""
    return row_reader.read_rows(cache.pages, cache.layout, slots_N)


@implements(write_rows)
def write_rows_triton(cache: CacheHandle, slots_N: Tensor, rows_ND: Tensor) -> None:
    """See the contract."""
    if rows_ND.shape != (slots_N.shape[0], cache.layout.width):
        raise ShapeError(f"rows {tuple(rows_ND.shape)} for {slots_N.shape[0]} slots of {cache.layout.width} lanes")
    row_writer.write_rows(cache.pages, cache.layout, slots_N, rows_ND)


def check_latents(kv_TD: Tensor, norm_weight_D: Tensor, cache: CacheHandle) -> None:
    """Checks that latents, gain and cache rows have one width.

    Raises:
        ShapeError: If they have not.
    """
    width = cache.layout.width
    if kv_TD.shape[1:] != (width,) or norm_weight_D.shape != (width,):
        raise ShapeError(f"latents {tuple(kv_TD.shape)} and gain {tuple(norm_weight_D.shape)} for rows of {width}")


@implements(insert_window)
def insert_window_triton(
    plan: AttentionPlan,
    kv_TD: Tensor,
    norm_weight_D: Tensor,
    rope: RopeTable,
    cache: CacheHandle,
    *,
    eps: float,
) -> None:
    """See the contract."""
    check_latents(kv_TD, norm_weight_D, cache)
    window_insert.insert_window(
        kv_TD,
        norm_weight_D,
        plan.batch.positions_T,
        plan.window_slot_mapping_T,
        rope.cos_sin_PR,
        cache.pages,
        cache.layout,
        eps=eps,
    )
