"""Grouped output projection by DeepGEMM. Shapes as in `halocline.hal.ops.attention`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from halocline.backends_cuda.gemm_deep_gemm import SCALE_ORDER, deep_gemm
from halocline.backends_triton.gemm_triton import TritonWeight, prepare_weight, stored_matrices
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight
from halocline.hal.op import implements
from halocline.hal.ops.attention import AttentionPlan, output
from halocline.hal.ops.gemm import PreparedWeight, prepare_linear
from halocline.hal.ops.rope import RopeTable
from halocline.hal.step_sizes import row_runs
from halocline.kernels_portable.inverse_rope import rotate_back_and_quantize
from halocline.kernels_portable.linear_layer import project_outputs
from halocline.kernels_portable.target import target_of
from halocline.kernels_portable.thin_fp8_gemm import MOST_ROWS

__all__ = ["output_deep_gemm", "prepare_output_deep_gemm"]


@implements(prepare_linear)
def prepare_output_deep_gemm(weight: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedWeight:
    """See the contract."""
    return prepare_weight(weight, activation=activation)


@implements(output)
def output_deep_gemm(
    plan: AttentionPlan, out_THD: Tensor, rope: RopeTable, wo_a: PreparedWeight, *, num_groups: int
) -> Tensor:
    """See the contract. The input is rounded to E4M3 in groups of 128 lanes; a single row is the portable kernel's."""
    assert isinstance(wo_a, TritonWeight)
    num_tokens, num_heads, width = out_THD.shape
    rows, lanes = wo_a.shape[0] // num_groups, num_heads // num_groups * width
    if num_heads % num_groups or wo_a.shape != (rows * num_groups, lanes):
        raise ShapeError(f"{num_heads} heads of {width} in {num_groups} groups against wo_a of shape {wo_a.shape}")
    if wo_a.scale is None or rows % 128 or lanes % 128:
        raise ShapeError(f"groups of {rows} x {lanes} in {wo_a.format.value}: FP8 in whole blocks of 128 is needed")
    if num_tokens <= MOST_ROWS:
        return project_outputs(
            out_THD,
            plan.batch.positions_T,
            rope.cos_sin_PR,
            stored_matrices(wo_a, num_groups),
            rounds_input=True,
            target=target_of(out_THD.device),
            batch_invariant=False,
        )
    runs = row_runs(num_tokens)
    out_TGR = torch.empty(
        (sum(run.padded for run in runs), num_groups, rows), dtype=torch.bfloat16, device=out_THD.device
    )
    w = wo_a.data.view(num_groups, rows, lanes), wo_a.scale.view(num_groups, rows // 128, lanes // 128)
    for start, count, padded in runs:
        codes, scales = rotate_back_and_quantize(
            out_THD[start : start + count],
            plan.batch.positions_T[start : start + count],
            rope.cos_sin_PR,
            fp8_dialect="ocp",
            scale_order=SCALE_ORDER,
            padded_rows=padded,
        )
        x = codes.view(padded, num_groups, lanes), scales.unflatten(1, (num_groups, lanes // 128))
        deep_gemm().fp8_einsum("bhr,hdr->bhd", x, w, out_TGR[start : start + padded], recipe=(1, 128, 128))
    return out_TGR[:num_tokens].flatten(1).to(out_THD.dtype)
