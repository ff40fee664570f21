"""The routed experts of a layer, out of the kernels of this package. T tokens, K chosen, E experts, D and I lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from halocline.kernels_portable.expert_alignment import ExpertBlocks, align_experts
from halocline.kernels_portable.expert_sum import sum_experts
from halocline.kernels_portable.gemm_tiles import GemmTiles, expert_tiles
from halocline.kernels_portable.grouped_gemm_fp4 import grouped_gemm_fp4
from halocline.kernels_portable.grouped_gemm_fp8 import grouped_gemm_fp8
from halocline.kernels_portable.grouped_gemm_plain import grouped_gemm_plain
from halocline.kernels_portable.quantize_activation import quantize_activation, round_activation
from halocline.kernels_portable.swiglu import Activated, swiglu
from halocline.kernels_portable.target import Target

__all__ = ["ExpertMatrices", "run_experts"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertMatrices:
    """One matrix of every expert.

    Attributes:
        format: `fp4` (MXFP4 or NVFP4, told apart by the number of scales), `fp8` (128 x 128 blocks) or `plain`.
        data: Contiguous (experts, out, in) as `format` stores it.
        scale: UE8M0 or E4M3 bytes of `fp4`, float32 of `fp8`, None for `plain`.
        global_scale: float32 of each expert, NVFP4 only.
        fp8_dialect: Of E4M3 codes in `data`.
    """

    format: Literal["fp4", "fp8", "plain"]
    data: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp"

    def __post_init__(self) -> None:
        """Checks that scales are there where the format needs them."""
        if (self.scale is None) != (self.format == "plain"):
            raise ValueError(f"experts in {self.format} {'lack' if self.scale is None else 'have'} scales")


def _multiply(
    x: Activated, experts: ExpertMatrices, blocks: ExpertBlocks, num_pairs: int, dtype: torch.dtype, tiles: GemmTiles
) -> Tensor:
    if experts.scale is None:
        return grouped_gemm_plain(x.rows_PI, experts.data, blocks, num_pairs=num_pairs, out_dtype=dtype, tiles=tiles)
    if experts.format == "fp4":
        return grouped_gemm_fp4(
            x.rows_PI,
            experts.data,
            experts.scale,
            experts.global_scale,
            blocks,
            num_pairs=num_pairs,
            out_dtype=dtype,
            tiles=tiles,
        )
    return grouped_gemm_fp8(
        x.rows_PI, x.scales_PG, experts.data, experts.scale, blocks, num_pairs=num_pairs, out_dtype=dtype, tiles=tiles
    )


def run_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    limit: float,
    rounds_input: bool,
    target: Target,
    batch_invariant: bool,
) -> Tensor:
    """Sum over chosen experts of down(weight * swiglu(gate, up)).

    Args:
        x_TD: (tokens, hidden) bfloat16 or float32.
        ids_TK: Contiguous int32 experts; negative ones contribute nothing.
        weights_TK: Contiguous float32 routing weights.
        gate_up: (experts, 2 * width, hidden): gate rows, then up rows.
        down: (experts, hidden, width).
        limit: SwiGLU clamp; 0 means none.
        rounds_input: Whether the inputs of both products are rounded to E4M3 in groups of 128 lanes. FP4 experts
            multiply the rounded values, FP8 experts the codes.
        target: Device.
        batch_invariant: Whether tiles must not depend on the number of tokens.

    Returns:
        (tokens, hidden) in the type of `x_TD`.
    """
    num_tokens, num_chosen = ids_TK.shape
    num_experts, num_pairs = gate_up.data.shape[0], num_tokens * num_chosen
    takes_codes = rounds_input and gate_up.format == "fp8"
    element_bytes = 1 if takes_codes else x_TD.element_size()
    tiles = expert_tiles(
        target,
        mean_rows=triton.cdiv(num_pairs, num_experts),
        element_bytes=element_bytes,
        batch_invariant=batch_invariant,
    )
    blocks = align_experts(ids_TK, num_experts=num_experts, rows=tiles.rows)
    if takes_codes:
        x = Activated(*quantize_activation(x_TD, fp8_dialect=gate_up.fp8_dialect))
    else:
        x = Activated(round_activation(x_TD) if rounds_input else x_TD, None)
    gate_up_PI2 = _multiply(x, gate_up, blocks, num_pairs, torch.float32, tiles)
    activated = swiglu(
        gate_up_PI2,
        limit=limit,
        weights_P=weights_TK.view(-1),
        ids_P=ids_TK.view(-1),
        dtype=x_TD.dtype,
        rounding="codes" if takes_codes else "values" if rounds_input else "none",
        fp8_dialect=down.fp8_dialect,
    )
    y_PD = _multiply(activated, down, blocks, num_pairs, x_TD.dtype, tiles)
    return sum_experts(y_PD, ids_TK, out_dtype=x_TD.dtype)
