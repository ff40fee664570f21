"""FlashMLA under its several homes, with what differs between them settled once.

`sgl_kernel.flash_mla` and `flash_mla` of tokenspeed-flashmla take the same calls. `flash_mla` of sgl-flash-mla has two
halves and runs on sm_90 only with `use_legacy=True`. The log-sum-exp of sparse prefill is in powers of two in
sgl_kernel 0.4.5 and natural elsewhere; that of decode is natural everywhere.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from halocline.backends_cuda.manifest import FLASHMLA
from halocline.hal.errors import ShapeError
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.runtime import import_provider

__all__ = ["HEADS", "FlashMla", "flash_mla", "flash_mla_pages", "num_schedule_parts", "pad_heads"]

HEADS = (64, 128)
"""Numbers of heads that the library computes."""

_ROWS = 64  # rows of a block of the decode kernel
# What the library's own scheduler says of one token with two blocks, a part for each; then a part without work.
_TWO_BLOCKS = [[0, 0, 0, 1, 0, 1, 1], [0, 0, 1, 2, 1, 1, 1]]


@dataclass(frozen=True, eq=False, kw_only=True)
class FlashMla:
    """The library's functions, looked up in each call: what launches is stood in for in a step that is not run.

    Attributes:
        module: Where they are.
        options: Keywords that this home needs in both calls.
        prefill_lse_unit: Factor that makes the log-sum-exp of prefill natural.
    """

    module: Any
    options: Mapping[str, Any]
    prefill_lse_unit: float

    def decode(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """`flash_mla_with_kvcache`: output and log-sum-exp."""
        found: tuple[Tensor, Tensor] = self.module.flash_mla_with_kvcache(*arguments, **options)
        return found

    def prefill(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`flash_mla_sparse_fwd`: output, largest logits, log-sum-exp."""
        found: tuple[Tensor, Tensor, Tensor] = self.module.flash_mla_sparse_fwd(*arguments, **options)
        return found

    def new_schedule(self) -> Any:
        """An empty schedule object, which the first call that takes it fills."""
        return self.module.get_mla_metadata()[0]


@functools.cache
def flash_mla() -> FlashMla:
    """The library that selection chose, imported."""
    package = import_provider(FLASHMLA)
    in_sgl_kernel = package.__name__ == "sgl_kernel"
    module = import_module("sgl_kernel.flash_mla") if in_sgl_kernel else package
    has_halves = "use_legacy" in inspect.signature(module.flash_mla_with_kvcache).parameters
    legacy = has_halves and torch.cuda.get_device_capability()[0] == 9
    return FlashMla(
        module=module,
        options={"use_legacy": True} if legacy else {},
        prefill_lse_unit=math.log(2.0) if in_sgl_kernel else 1.0,
    )


@functools.cache
def num_schedule_parts(num_heads: int, device: torch.device) -> int:
    """Parts of the library's decode schedules for 64 or 128 heads, found by one small call.

    0 where its schedules have another form than those of `split_schedule`: the library then makes its own, in a
    kernel that works off the parts one by one and takes 26 us.
    """
    library = flash_mla()
    layout = cache_layout("latent", RowFormat.FP8_BLOCK64, width=512, rope_width=64, page_rows=_ROWS)
    pages = torch.zeros((1, layout.page_stride), dtype=torch.uint8, device=device)
    schedule: Any = library.new_schedule()
    library.decode(
        torch.zeros((1, 1, num_heads, layout.width), dtype=torch.bfloat16, device=device),
        flash_mla_pages(CacheHandle(layout=layout, num_pages=1, pages=pages)),
        None,
        None,
        layout.width,
        schedule,
        softmax_scale=1.0,
        is_fp8_kvcache=True,
        indices=torch.full((1, 1, 2 * _ROWS), -1, dtype=torch.int32, device=device),
        attn_sink=torch.zeros((num_heads,), device=device),
        topk_length=torch.full((1,), 2 * _ROWS, dtype=torch.int32, device=device),
        **library.options,
    )
    parts = schedule.tile_scheduler_metadata.tolist()
    known = [part[:7] for part in parts[:2]] == _TWO_BLOCKS and all(len(part) == 8 and part[0] for part in parts[2:])
    return len(parts) if known and schedule.num_splits.tolist() == [0, 2] else 0


def flash_mla_pages(cache: CacheHandle) -> Tensor:
    """The view that the library takes of a cache: (pages, page rows, 1, 584) with the page's own stride.

    Rows of a page are not 584 bytes apart (scales follow the data of the whole page); the library knows.

    Raises:
        ShapeError: If the rows are not FP8 latents of 584 bytes.
    """
    layout = cache.layout
    if layout.format is not RowFormat.FP8_BLOCK64 or layout.row_bytes != 584:
        raise ShapeError(f"FlashMLA reads rows of 584 bytes (fp8_block64 of 512 lanes), found {layout.name}")
    shape = (cache.num_pages, layout.page_rows, 1, layout.row_bytes)
    strides = (layout.page_stride, layout.row_bytes, layout.row_bytes, 1)
    return cache.pages.as_strided(shape, strides)


def pad_heads(q_THD: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and sinks padded to the 64 or 128 heads that the library computes.

    Raises:
        ShapeError: If there are more than 128 heads.
    """
    num_heads = q_THD.shape[1]
    wanted = next((heads for heads in HEADS if heads >= num_heads), None)
    if wanted is None:
        raise ShapeError(f"FlashMLA computes up to {HEADS[-1]} heads, found {num_heads}")
    sink_H = sink_H.float()
    if wanted == num_heads:
        return (q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous()), sink_H.contiguous()
    extra = wanted - num_heads
    return torch.nn.functional.pad(q_THD, (0, 0, 0, extra)), torch.nn.functional.pad(sink_H, (0, extra))
