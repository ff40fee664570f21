"""Two matrices that read the same input, as one product where their stored forms can be joined by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from halocline.models.weight_source import join_rows

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Weight
    from halocline.hal.ops import Ops

__all__ = ["JoinedLinear"]


class JoinedLinear:
    """One product, and one rounding of the input, in place of two; two where blocks of scales would straddle."""

    def __init__(self, ops: Ops, first: Weight, second: Weight, *, activation: Literal["none", "fp8_group128"]) -> None:
        """Takes two matrices (out, in) of the same input width; see `gemm.prepare_linear` for `activation`."""
        self.ops = ops
        self.widths = (first.shape[0], second.shape[0])
        self.weights = [ops.gemm.prepare_linear(w, activation=activation) for w in join_rows(first, second)]

    def joined(self, x_TK: Tensor) -> Tensor:
        """Both results side by side, in the element type of the input: (rows, out of the first + out of the second)."""
        parts = [self.ops.gemm.linear(x_TK, weight) for weight in self.weights]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def apart(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Each result by itself; views of one tensor where the product is one."""
        if len(self.weights) == 2:
            first, second = (self.ops.gemm.linear(x_TK, weight) for weight in self.weights)
        else:
            first, second = self.ops.gemm.linear(x_TK, self.weights[0]).split(self.widths, dim=-1)
        return first, second
