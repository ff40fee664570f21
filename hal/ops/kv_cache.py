"""Contracts of the paged cache. The backend owns the bytes; models and engine pass handles, slots and page tables.

A *slot* is page number * page rows + row within the page, numbered in each cache by itself. N rows, D lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import CacheLayout
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.rope import RopeTable

__all__ = ["CacheHandle", "allocate", "insert_window", "read_rows", "write_rows"]

_EXACT = {
    "float32": Tolerance(atol=0.0, rtol=0.0, norm=0.0, reason="the same bytes give the same values"),
    "bfloat16": Tolerance(atol=0.0, rtol=0.0, norm=0.0, reason="the same bytes give the same values"),
}


@dataclass(eq=False, kw_only=True)
class CacheHandle:
    """The pages of one cache of one layer. Only the backend that allocated it looks at `pages`.

    Attributes:
        layout: Meaning of the bytes.
        num_pages: Pages allocated.
        pages: uint8 (pages, page stride) for byte storage; a differentiable float32 (rows, lanes) tensor, replaced
            on each insert, for autograd storage.
    """

    layout: CacheLayout
    num_pages: int
    pages: Tensor


@op("kv_cache")
def allocate(layout: CacheLayout, num_pages: int, *, device: str) -> CacheHandle:
    """Allocates a zeroed cache.

    Args:
        layout: Bytes of a page.
        num_pages: Pages; the bytes taken are exactly num_pages * layout.page_stride (byte storage).
        device: Where, in torch's words.

    Returns:
        The handle.

    Raises:
        OutOfPagesError: If the device has not enough memory, with both numbers.
    Numerics: every row reads as zeros.
    """
    raise NotImplementedError


@op("kv_cache", tolerances=_EXACT, semantics=("cache_format", "fp8_dialect"))
def read_rows(cache: CacheHandle, slots_N: Tensor) -> Tensor:
    """Reads rows as values, for tests, prefix checks and the gathered prefill workspace.

    Args:
        cache: Any cache of this backend.
        slots_N: (rows,) int32 or int64 slots; -1 reads zeros.

    Returns:
        (rows, width) float32 values after the round trip of the row format.

    Raises:
        ShapeError: If a slot lies behind the cache.
    Numerics: exact: code times scale in float32. Byte offsets are 64-bit.
    Source: DeepSeek-V4 report; layouts after FlashMLA's sparse decode and DeepGEMM's paged index logits.
    """
    raise NotImplementedError


@op("kv_cache", tolerances=_EXACT, semantics=("cache_format", "fp8_dialect"), mutates=("cache",))
def write_rows(cache: CacheHandle, slots_N: Tensor, rows_ND: Tensor) -> None:
    """Rounds and stores rows that are already normed and rotated.

    Args:
        cache: Any cache of this backend; written in place.
        slots_N: (rows,) int32 or int64 slots, each at most once; -1 writes nothing.
        rows_ND: (rows, width) float32 or bfloat16 values.

    Raises:
        ShapeError: If the widths differ or a slot lies behind the cache.
    Numerics: E4M3 and E2M1 groups take the scale rule of `halocline.hal.codecs`. In the FNUZ dialect a code keeps its
        OCP byte, which means half as much there (-0 becomes 0), and its scale doubles. Byte offsets are 64-bit.
    Source: DeepSeek-V4 report; layouts after FlashMLA's sparse decode and DeepGEMM's paged index logits.
    """
    raise NotImplementedError


@op(
    "kv_cache",
    tolerances={
        "float32": Tolerance(atol=1e-5, rtol=1e-5, norm=1e-6, reason="float32 norm and rotation"),
        "bfloat16": Tolerance(atol=0.13, rtol=7e-2, norm=1.5e-2, reason="a bfloat16 difference may flip one E4M3 step"),
    },
    semantics=("cache_format", "fp8_dialect", "rope_pairing"),
    mutates=("cache",),
)
def insert_window(
    plan: AttentionPlan,
    kv_TD: Tensor,
    norm_weight_D: Tensor,
    rope: RopeTable,
    cache: CacheHandle,
    *,
    eps: float,
) -> None:
    """Norms, rotates, rounds and stores the latent of each token in its window slot.

    Args:
        plan: Of this step; gives positions and `window_slot_mapping_T`. Padding stores nothing.
        kv_TD: (tokens, width) bfloat16 or float32 output of the latent projection.
        norm_weight_D: (width,) gain.
        rope: Table of this layer's kind.
        cache: Window cache of this layer, written in place.
        eps: Added to the mean square.

    Raises:
        ShapeError: If widths differ.
    Numerics: float32 norm over all lanes, rotation of the last lanes at the token's position, one rounding to the
        compute type, then the rounding of the row format.
    Source: DeepSeek-V4 report; layout after FlashMLA's sparse decode.
    """
    raise NotImplementedError
