"""Dense products by the portable kernels, for every weight format. T rows, K lanes in, N lanes out, G groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halocline.backends_cuda.block_scales import block_codes, block_scales
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.op import implements
from halocline.hal.ops.gemm import PreparedWeight, linear, prepare_linear
from halocline.kernels_portable.dense_gemm import dense_gemm
from halocline.kernels_portable.expert_alignment import ExpertBlocks
from halocline.kernels_portable.fp8_gemm import fp8_gemm
from halocline.kernels_portable.gemm_tiles import expert_tiles, gemm_tiles
from halocline.kernels_portable.grouped_gemm_fp4 import grouped_gemm_fp4
from halocline.kernels_portable.quantize_activation import quantize_activation, round_activation
from halocline.kernels_portable.target import target_of

__all__ = ["TritonWeight", "linear_triton", "multiply_groups", "prepare_linear_triton", "prepare_weight"]

_PLAIN = (WeightFormat.FLOAT32, WeightFormat.BFLOAT16)


@dataclass(frozen=True, eq=False, kw_only=True)
class TritonWeight:
    """A matrix in the bytes of its checkpoint.

    Attributes:
        format: How `data` is stored.
        shape: Logical (out, in).
        data: Contiguous elements; packed pairs for E2M1.
        scale: float32 for FP8, bytes for E2M1, None for plain ones.
        global_scale: float32 (1,), NVFP4 only.
        rounds_input: Whether inputs are rounded to E4M3 in groups of 128 lanes.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    data: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    rounds_input: bool


def prepare_weight(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> TritonWeight:
    """See `halocline.hal.ops.gemm.prepare_linear`."""
    if len(weight.shape) != 2:
        raise ShapeError(f"a matrix is needed, found a weight of shape {weight.shape}")
    scale, data = None, weight.data
    if weight.format is WeightFormat.FP8_BLOCK:
        scale, data = block_scales(weight), block_codes(weight)
    elif weight.format not in _PLAIN:
        if weight.scale is None:
            raise ShapeError(f"a weight in {weight.format.value} of shape {weight.shape} has no scale")
        scale = weight.scale.contiguous().view(torch.uint8)
    return TritonWeight(
        format=weight.format,
        shape=tuple(weight.shape),
        data=data.contiguous(),
        scale=scale,
        global_scale=None if weight.global_scale is None else weight.global_scale.reshape(1).float(),
        rounds_input=activation == "fp8_group128" and weight.format not in _PLAIN,
    )


@implements(prepare_linear)
def prepare_linear_triton(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract."""
    return prepare_weight(weight, activation=activation)


@implements(linear)
def linear_triton(x_TK: Tensor, weight: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """See the contract."""
    assert isinstance(weight, TritonWeight)
    if x_TK.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"rows of {x_TK.shape[-1]} lanes against a weight of shape {weight.shape}")
    out_dtype = out_dtype or x_TK.dtype
    if weight.format in (WeightFormat.MXFP4, WeightFormat.NVFP4):
        return _multiply_fp4(x_TK, weight, out_dtype)
    return multiply_groups(x_TK, weight, 1, out_dtype=out_dtype)


def multiply_groups(x_TK: Tensor, weight: TritonWeight, num_groups: int, *, out_dtype: torch.dtype) -> Tensor:
    """Multiplies each of several groups of a row's lanes by its own rows of a plain or FP8 matrix.

    Args:
        x_TK: (rows, groups * K).
        weight: (groups * N, K).
        num_groups: Groups; for FP8, rows of a group are a multiple of 128 or divide it.
        out_dtype: Element type of the result.

    Returns:
        (rows, groups * N).
    """
    data_GNK = weight.data.view(num_groups, -1, weight.shape[1])
    target = target_of(x_TK.device)
    if weight.scale is None:
        wide = max(x_TK.element_size(), weight.data.element_size())
        tiles = gemm_tiles(target, num_rows=x_TK.shape[0], element_bytes=wide, batch_invariant=False)
        return dense_gemm(x_TK, data_GNK, out_dtype=out_dtype, tiles=tiles)
    x, x_scale = (
        quantize_activation(x_TK, fp8_dialect="ocp") if weight.rounds_input and num_groups == 1 else (x_TK, None)
    )
    tiles = gemm_tiles(target, num_rows=x.shape[0], element_bytes=x.element_size(), batch_invariant=False)
    scale_GNB = _scales_of_groups(weight.scale, num_groups, data_GNK.shape[1])
    return fp8_gemm(x, x_scale, data_GNK, scale_GNB, out_dtype=out_dtype, tiles=tiles)


def _scales_of_groups(scale_NB: Tensor, num_groups: int, rows: int) -> Tensor:
    """Scales (groups, blocks of rows, blocks of lanes); several small groups may lie in one block of 128 rows.

    Raises:
        ShapeError: If a group begins or ends within a block that it does not share whole.
    """
    if num_groups == 1 or rows % 128 == 0:
        return scale_NB.view(num_groups, -1, scale_NB.shape[-1])
    if 128 % rows:
        raise ShapeError(f"groups of {rows} rows: scales of 128 rows would straddle them")
    blocks_G = torch.arange(num_groups, device=scale_NB.device) * rows // 128
    return scale_NB.index_select(0, blocks_G)[:, None].contiguous()


def _multiply_fp4(x_TK: Tensor, weight: TritonWeight, out_dtype: torch.dtype) -> Tensor:
    """One FP4 matrix is one expert that every row has chosen."""
    assert weight.scale is not None
    num_rows = x_TK.shape[0]
    x = round_activation(x_TK) if weight.rounds_input else x_TK
    tiles = expert_tiles(target_of(x.device), mean_rows=num_rows, element_bytes=x.element_size(), batch_invariant=False)
    num_blocks = -(-num_rows // tiles.rows)
    pairs_N = torch.arange(num_blocks * tiles.rows, dtype=torch.int32, device=x.device)
    pairs_N = torch.where(pairs_N < num_rows, pairs_N, -1)
    experts_B = torch.zeros((num_blocks,), dtype=torch.int32, device=x.device)
    return grouped_gemm_fp4(
        x,
        weight.data[None],
        weight.scale[None],
        weight.global_scale,
        ExpertBlocks(pairs_N, experts_B, tiles.rows),
        num_pairs=num_rows,
        out_dtype=out_dtype,
        tiles=tiles,
    )
