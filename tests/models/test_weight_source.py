"""Matrices joined by rows: one product gives what two gave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import dequantize, quantize_weight
from halocline.models.weight_source import join_rows


def normal(rows: int, lanes: int, seed: int) -> Tensor:
    return torch.randn(rows, lanes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stored", [WeightFormat.FP8_BLOCK, WeightFormat.MXFP4, WeightFormat.BFLOAT16])
def test_joined_matrices_hold_both_in_order(stored: WeightFormat) -> None:
    first, second = (quantize_weight(normal(rows, 256, rows), stored) for rows in (256, 192))
    (joined,) = join_rows(first, second)
    assert (joined.format, joined.shape) == (stored, (448, 256))
    assert joined.data.dtype == first.data.dtype
    expected = torch.cat((dequantize(first), dequantize(second)))
    torch.testing.assert_close(dequantize(joined), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        (WeightFormat.FP8_BLOCK, WeightFormat.FP8_BLOCK, 192),  # a block of 128 rows would straddle them
        (WeightFormat.NVFP4, WeightFormat.NVFP4, 256),  # each has a global scale
        (WeightFormat.FP8_BLOCK, WeightFormat.MXFP4, 256),
    ],
)
def test_what_cannot_be_joined_stays_apart(one: WeightFormat, other: WeightFormat, rows: int) -> None:
    first, second = quantize_weight(normal(rows, 256, 1), one), quantize_weight(normal(rows, 256, 2), other)
    found = join_rows(first, second)
    assert len(found) == 2
    assert (found[0] is first, found[1] is second) == (True, True)
