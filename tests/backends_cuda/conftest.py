"""Steps, caches and row selections on the CPU, for adapters whose library is replaced by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from halocline.backends_reference.kv_cache import allocate_reference, write_rows_reference
from halocline.backends_reference.plan import plan_reference
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
from halocline.hal.ops.kv_cache import CacheHandle


@dataclass(eq=False, kw_only=True)
class Step:
    """A step of a few requests with filled caches.

    Attributes:
        plan: By the reference.
        window: Window rows.
        compressed: Rows of ratio 128, two to a page.
        keys: Index keys of ratio 4, 64 to a page.
    """

    plan: AttentionPlan
    window: CacheHandle
    compressed: CacheHandle
    keys: CacheHandle


def _filled(layout: Any, num_pages: int, seed: int) -> CacheHandle:
    cache = allocate_reference(layout, num_pages, device="cpu")
    rows = torch.randn(num_pages * layout.page_rows, layout.width, generator=torch.Generator().manual_seed(seed))
    write_rows_reference(cache, torch.arange(num_pages * layout.page_rows), rows)
    return cache


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """Makes a step from the last positions and token counts of its requests."""

    def make(seqlens: list[int], counts: list[int], *, num_decode: int = 0) -> Step:
        geometry = CacheGeometry(
            window=128, window_page_rows=64, page_tokens=256, ratios=(4, 128), index_topk=64, max_positions=2048
        )
        requests, total = len(seqlens), sum(counts)
        positions = [p for s, c in zip(seqlens, counts, strict=True) for p in range(s - c, s)]
        owners = [r for r, c in enumerate(counts) for _ in range(c)]
        window_pages, token_pages = -(-2048 // 64), -(-2048 // 256)

        def integers(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        order = torch.randperm(requests * window_pages, generator=torch.Generator().manual_seed(1)).int()
        tokens = torch.randperm(requests * token_pages, generator=torch.Generator().manual_seed(2)).int()
        batch = BatchMetadata(
            token_ids_T=integers([0] * total),
            positions_T=integers(positions),
            token_requests_T=integers(owners),
            query_starts_R1=integers([0, *torch.tensor(counts).cumsum(0).tolist()]),
            seqlens_R=integers(seqlens),
            state_slots_R=torch.arange(requests, dtype=torch.int32),
            window_pages_RP=order.view(requests, window_pages),
            token_pages_RP=tokens.view(requests, token_pages),
            num_tokens=total,
            num_requests=requests,
            num_decode_tokens=sum(counts[:num_decode]),
            num_decode_requests=num_decode,
            max_seqlen=max(seqlens),
        )
        latent = {"width": 512, "rope_width": 64}
        return Step(
            plan=plan_reference(batch, geometry, "ragged"),
            window=_filled(
                cache_layout("latent", RowFormat.FP8_BLOCK64, page_rows=64, **latent), requests * window_pages, 3
            ),
            compressed=_filled(
                cache_layout("latent", RowFormat.FP8_BLOCK64, page_rows=2, **latent), requests * token_pages, 4
            ),
            keys=_filled(
                cache_layout("index_key", RowFormat.FP8_ROW, width=128, rope_width=64, page_rows=64),
                requests * token_pages,
                5,
            ),
        )

    return make
