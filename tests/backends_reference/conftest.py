"""Batches, plans, caches and rotary tables by hand, for tests of the reference kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.kv_cache import allocate_reference, write_rows_reference
from halocline.backends_reference.plan import plan_reference
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.ops.attention import AttentionPlan
from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.rope import RopeTable


def _batch(
    positions: Sequence[Sequence[int]],
    *,
    padding: int = 0,
    window_pages: Sequence[Sequence[int]] = (),
    token_pages: Sequence[Sequence[int]] = (),
    num_decode: int = 0,
) -> BatchMetadata:
    """A step in which request r brings the given consecutive positions; pages are numbered in order by default."""

    def table(pages: Sequence[Sequence[int]]) -> Tensor:
        wanted = pages or [range(64 * request, 64 * request + 64) for request in range(len(positions))]
        rows = torch.tensor([list(row) for row in wanted], dtype=torch.int32).reshape(len(positions), -1)
        return torch.cat((rows, torch.full((padding, rows.shape[1]), -1, dtype=torch.int32)))

    def padded(values: list[int], filler: int) -> Tensor:
        return torch.tensor([*values, *([filler] * padding)], dtype=torch.int32)

    counts = [len(row) for row in positions]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    lengths = [row[-1] + 1 if row else 0 for row in positions]
    flat = [position for row in positions for position in row]
    owners = [request for request, row in enumerate(positions) for _ in row]
    return BatchMetadata(
        token_ids_T=padded([0] * len(flat), 0),
        positions_T=padded(flat, -1),
        token_requests_T=padded(owners, -1),
        query_starts_R1=padded(starts, len(flat)),
        seqlens_R=padded(lengths, 0),
        state_slots_R=padded(list(range(len(positions))), -1),
        window_pages_RP=table(window_pages),
        token_pages_RP=table(token_pages),
        num_tokens=len(flat),
        num_requests=len(positions),
        num_decode_tokens=sum(counts[:num_decode]),
        num_decode_requests=num_decode,
        max_seqlen=max([*lengths, 0]),
    )


def _geometry(**changes: Any) -> CacheGeometry:
    sizes = {
        "window": 4, "window_page_rows": 4, "page_tokens": 128, "ratios": (4, 128), "index_topk": 8,
        "max_positions": 8192,
    }  # fmt: skip
    return CacheGeometry(**{**sizes, **changes})


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., BatchMetadata]:
    return _batch


@pytest.fixture(scope="session")
def make_geometry() -> Callable[..., CacheGeometry]:
    return _geometry


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., AttentionPlan]:
    """The plan of a step; options of `make_batch`, then sizes."""

    def make(positions: Sequence[Sequence[int]], *, sizes: dict[str, Any] | None = None, **options: Any) -> Any:
        return plan_reference(_batch(positions, **options), _geometry(**(sizes or {})), "paged")

    return make


@pytest.fixture(scope="session")
def make_cache() -> Callable[..., CacheHandle]:
    """A cache of plain float32 rows, with given rows in its first slots."""

    def make(
        rows: Any = None,
        *,
        width: int = 0,
        page_rows: int = 4,
        num_pages: int = 64,
        kind: Any = "latent",
        stored: str = "float32",
    ) -> CacheHandle:
        values = None if rows is None else torch.as_tensor(rows, dtype=torch.float32)
        lanes = width if values is None else values.shape[1]
        layout = cache_layout(
            kind, RowFormat(stored), width=lanes, rope_width=64 if stored == "fp8_block64" else 0, page_rows=page_rows
        )
        cache = allocate_reference(layout, num_pages, device="cpu")
        if values is not None:
            write_rows_reference(cache, torch.arange(len(values)), values)
        return cache

    return make


@pytest.fixture(scope="session")
def make_rope() -> Callable[..., RopeTable]:
    """A table whose pair i turns by `turns[i]` radians for each position."""

    def make(turns: Sequence[float], positions: int = 300) -> RopeTable:
        angles = torch.arange(positions)[:, None] * torch.tensor(turns)
        return RopeTable(cos_sin_PR=torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1))

    return make
