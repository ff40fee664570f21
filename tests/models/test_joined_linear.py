"""Two matrices over one input: the numbers of each by itself in float64, in one call where that can be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.gemm import linear_reference, prepare_linear_reference
from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import dequantize, quantize_weight
from halocline.models.layers.joined_linear import JoinedLinear


def _normal(rows: int, lanes: int, seed: int) -> Tensor:
    return torch.randn(rows, lanes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("stored", "rows", "calls"),
    [
        (WeightFormat.BFLOAT16, 192, 1),
        (WeightFormat.FP8_BLOCK, 256, 1),
        (WeightFormat.FP8_BLOCK, 192, 2),  # a block of scales would straddle both
        (WeightFormat.NVFP4, 256, 2),  # each has a global scale
    ],
)
def test_each_result_is_that_of_its_own_matrix(stored: WeightFormat, rows: int, calls: int) -> None:
    first, second = quantize_weight(_normal(rows, 256, 1), stored), quantize_weight(_normal(128, 256, 2), stored)
    x_TK = _normal(5, 256, 3)
    seen: list[int] = []

    def linear(x: Tensor, weight: Any) -> Tensor:
        seen.append(weight.shape[0])
        return linear_reference(x, weight)

    ops: Any = SimpleNamespace(gemm=SimpleNamespace(prepare_linear=prepare_linear_reference, linear=linear))
    product = JoinedLinear(ops, first, second, activation="none")
    expected = [(x_TK.double() @ dequantize(w).double().T).float() for w in (first, second)]
    for found, right in zip(product.apart(x_TK), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(product.joined(x_TK), torch.cat(expected, dim=1), atol=1e-4, rtol=1e-5)
    assert seen == ([rows + 128] * 2 if calls == 1 else [rows, 128] * 2)
