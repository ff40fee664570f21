"""Widening of row selections: what is seen stays the same, and a copy is made only where there is no room."""

from __future__ import annotations

import pytest
import torch

from halocline.backends_triton.row_widths import padded_rows, whole_rows
from halocline.hal.ops.attention import RowSelection


def selection(width: int, stride: int, *, tokens: int = 3, first: int = 0) -> RowSelection:
    buffer = torch.arange((tokens + first) * stride, dtype=torch.int32).view(-1, stride)
    return RowSelection(buffer[first:, :width], torch.full((tokens,), width, dtype=torch.int32))


@pytest.mark.parametrize(("width", "stride", "wanted"), [(64, 64, 64), (5, 128, 64), (65, 128, 128), (65, 100, 128)])
@pytest.mark.parametrize("first", [0, 2])
def test_padded(width: int, stride: int, wanted: int, first: int) -> None:
    rows = selection(width, stride, first=first)
    found = padded_rows(rows, 64)
    assert found.slots_TK.shape == (3, wanted)
    assert torch.equal(found.slots_TK[:, :width], rows.slots_TK)
    shares = found.slots_TK.data_ptr() == rows.slots_TK.data_ptr()
    assert shares is (wanted <= stride)
    if not shares:
        assert bool((found.slots_TK[:, width:] == -1).all())


@pytest.mark.parametrize(("width", "stride", "start"), [(64, 69, 0), (5, 131, 0), (64, 128, 2)])
def test_rows_that_begin_beside_16_bytes_are_copied(width: int, stride: int, start: int) -> None:
    buffer = torch.arange(3 * stride, dtype=torch.int32).view(-1, stride)
    rows = RowSelection(buffer[:, start : start + width], torch.full((3,), width, dtype=torch.int32))
    found = padded_rows(rows, 64).slots_TK
    assert torch.equal(found[:, :width], rows.slots_TK)
    assert found.data_ptr() != rows.slots_TK.data_ptr()
    assert found.stride(0) % 4 == 0
    assert found.storage_offset() % 4 == 0


def test_columns_of_a_buffer_end_where_it_ends() -> None:
    buffer = torch.zeros(3, 100, dtype=torch.int32)
    rows = RowSelection(buffer[:, 90:], torch.full((3,), 10, dtype=torch.int32))
    found = padded_rows(rows, 64)
    assert found.slots_TK.data_ptr() != rows.slots_TK.data_ptr()
    assert whole_rows(rows).slots_TK.shape == (3, 10)


def test_whole_rows_have_one_width_whatever_the_view() -> None:
    assert {tuple(whole_rows(selection(width, 512)).slots_TK.shape) for width in (1, 7, 512)} == {(3, 512)}


def test_no_tokens() -> None:
    rows = selection(5, 128, tokens=0)
    assert padded_rows(rows, 64).slots_TK.shape == (0, 64)
