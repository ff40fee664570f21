"""Row selections against the reference's integer arithmetic."""

from __future__ import annotations

import pytest
import torch

from halocline.backends_reference.plan import slots_of_positions
from halocline.kernels_portable.row_plan import plan_blocks, plan_window

POSITIONS = torch.tensor([0, 1, 63, 64, 299, 300, -1, 700], dtype=torch.int32)
REQUESTS = torch.tensor([0, 0, 1, 1, 2, 2, -1, 0], dtype=torch.int32)


def pages(columns: int) -> torch.Tensor:
    table = torch.randperm(3 * columns, generator=torch.Generator().manual_seed(columns)).int().view(3, columns)
    table[2, 0] = -1
    return table


@pytest.mark.parametrize("window", [24, 128])
@pytest.mark.parametrize("page_rows", [8, 64])
def test_window(window: int, page_rows: int) -> None:
    table, tokens = pages(-(-701 // page_rows)), len(POSITIONS)
    buffer = torch.full((tokens, window + 8), -7, dtype=torch.int32)
    lengths, own = torch.empty(tokens, dtype=torch.int32), torch.empty(tokens, dtype=torch.int64)
    plan_window(
        POSITIONS, REQUESTS, table, page_rows=page_rows, slots_TK=buffer[:, :window], lengths_T=lengths, own_T=own
    )
    seen = (POSITIONS - (window - 1)).clamp_min(0)[:, None] + torch.arange(window, dtype=torch.int32)
    seen = seen.masked_fill(seen > POSITIONS[:, None], -1)
    expected = slots_of_positions(table, REQUESTS, seen, page_rows)
    assert torch.equal(buffer[:, :window].long(), expected)
    assert torch.equal(own, slots_of_positions(table, REQUESTS, POSITIONS[:, None], page_rows)[:, 0])
    assert lengths.tolist() == [min(max(p + 1, 0), window) for p in POSITIONS.tolist()]
    assert bool((buffer[:, window:] == -7).all())


@pytest.mark.parametrize(("ratio", "page_rows"), [(4, 64), (128, 2), (16, 3)])
def test_blocks(ratio: int, page_rows: int) -> None:
    table = pages(-(-701 // (ratio * page_rows)))
    entries = 701 // ratio
    buffer = torch.full((len(POSITIONS), entries + 5), -7, dtype=torch.int32)
    visible = torch.empty(len(POSITIONS), dtype=torch.int32)
    plan_blocks(
        POSITIONS, REQUESTS, table, ratio=ratio, page_rows=page_rows, visible_T=visible, slots_TK=buffer[:, :entries]
    )
    units = torch.arange(entries).expand(len(POSITIONS), -1)
    expected = slots_of_positions(table, REQUESTS, units, page_rows)
    expected = expected.masked_fill(units >= ((POSITIONS + 1) // ratio)[:, None], -1)
    assert torch.equal(visible, (POSITIONS + 1) // ratio)
    assert torch.equal(buffer[:, :entries].long(), expected)
    assert bool((buffer[:, entries:] == -7).all())


def test_only_counts_where_nobody_lists_the_blocks() -> None:
    visible = torch.empty(len(POSITIONS), dtype=torch.int32)
    plan_blocks(POSITIONS, REQUESTS, pages(3), ratio=4, page_rows=64, visible_T=visible, slots_TK=None)
    assert torch.equal(visible, (POSITIONS + 1) // 4)


def test_no_tokens() -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    plan_blocks(nothing, nothing, pages(3), ratio=4, page_rows=64, visible_T=nothing, slots_TK=None)
