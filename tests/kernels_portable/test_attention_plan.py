"""Row selections of a step against loops over positions."""

from __future__ import annotations

import pytest
import torch

from halocline.kernels_portable.attention_plan import plan_entries, plan_window

POSITIONS = torch.tensor([0, 5, 6, 7, 8, 127, 1, -1, -1], dtype=torch.int32)
REQUESTS = torch.tensor([0, 1, 1, 1, 1, 2, 2, -1, -1], dtype=torch.int32)


def _slot(pages: torch.Tensor, request: int, row: int, page_rows: int) -> int:
    column = row // page_rows
    page = int(pages[request, column]) if column < pages.shape[1] else -1
    return page * page_rows + row % page_rows if page >= 0 else -1


@pytest.mark.parametrize(("window", "page_rows"), [(6, 2), (128, 64), (24, 1)])
def test_window_rows(window: int, page_rows: int) -> None:
    pages = torch.randperm(3 * 140, generator=torch.Generator().manual_seed(0), dtype=torch.int32).view(3, 140)
    pages[1, :2] = -1  # freed
    tokens = len(POSITIONS)
    own, lengths = torch.full((tokens,), 99), torch.full((tokens,), 99, dtype=torch.int32)
    wide = torch.full((tokens, window + 5), 77, dtype=torch.int32)
    plan_window(POSITIONS, REQUESTS, pages, own, wide[:, :window], lengths, page_rows=page_rows)
    assert (wide[:, window:] == 77).all()
    for t, (position, request) in enumerate(zip(POSITIONS.tolist(), REQUESTS.tolist(), strict=True)):
        seen = range(max(0, position - window + 1), position + 1) if request >= 0 else range(0)
        expected = [_slot(pages, request, row, page_rows) for row in seen]
        assert lengths[t] == len(expected)
        assert wide[t, :window].tolist() == expected + [-1] * (window - len(expected))
        assert own[t] == (expected[-1] if expected else -1)


@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize(("ratio", "page_rows", "entries"), [(4, 16, 33), (128, 2, 3), (2, 1, 1500)])
def test_closed_blocks(ratio: int, page_rows: int, entries: int, with_rows: bool) -> None:
    pages = torch.arange(3 * 70, dtype=torch.int32).flip(0).view(3, 70)
    pages[2, 1] = -1
    tokens = len(POSITIONS)
    visible = torch.full((tokens,), 99, dtype=torch.int32)
    slots = torch.full((tokens, entries), 99, dtype=torch.int32) if with_rows else None
    plan_entries(POSITIONS, REQUESTS, pages, visible, slots, ratio=ratio, page_rows=page_rows)
    for t, (position, request) in enumerate(zip(POSITIONS.tolist(), REQUESTS.tolist(), strict=True)):
        closed = (position + 1) // ratio if request >= 0 else 0
        assert visible[t] == closed
        if slots is not None:
            expected = [_slot(pages, request, entry, page_rows) for entry in range(min(closed, entries))]
            assert slots[t].tolist() == expected + [-1] * (entries - len(expected))
