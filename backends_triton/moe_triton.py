"""The mixture of experts by the portable kernels. Shapes as in `halocline.hal.ops.moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halocline.backends_triton.block_scales import block_codes, block_scales
from halocline.backends_triton.device_facts import in_dialect_of
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.op import implements
from halocline.hal.ops.moe import (
    PreparedExperts,
    Routing,
    experts,
    prepare_experts,
    route_by_hash,
    route_by_score,
    swiglu,
)
from halocline.kernels_portable import route_by_hash as hash_router
from halocline.kernels_portable import route_by_score as score_router
from halocline.kernels_portable import swiglu as activation_kernel
from halocline.kernels_portable.expert_layer import ExpertMatrices, run_experts
from halocline.kernels_portable.target import target_of

__all__ = [
    "TritonExperts",
    "check_stacks",
    "experts_triton",
    "prepare_experts_triton",
    "route_by_hash_triton",
    "route_by_score_triton",
    "swiglu_triton",
]

_PLAIN = (WeightFormat.FLOAT32, WeightFormat.BFLOAT16)


@dataclass(frozen=True, eq=False, kw_only=True)
class TritonExperts:
    """Experts in the bytes of their checkpoint, but for the FP8 dialect, which is that of the device."""

    gate_up: ExpertMatrices
    down: ExpertMatrices
    hidden: int
    rounds_input: bool

    @property
    def num_experts(self) -> int:
        """Experts held."""
        return int(self.gate_up.data.shape[0])


def check_stacks(gate_up: Weight, down: Weight) -> None:
    """Checks that two stacks of experts belong together.

    Raises:
        ShapeError: If they do not.
    """
    (num_experts, two_i, hidden), (num_down, hidden_down, width) = gate_up.shape, down.shape
    if (num_experts, hidden, two_i) != (num_down, hidden_down, 2 * width):
        raise ShapeError(f"gate and up experts of shape {gate_up.shape} do not fit down {down.shape}")


def _matrices(weight: Weight) -> ExpertMatrices:
    if weight.format in _PLAIN:
        return ExpertMatrices(format="plain", data=weight.data.contiguous())
    if weight.format is WeightFormat.FP8_BLOCK:
        stored = in_dialect_of(weight, weight.data.device)
        return ExpertMatrices(
            format="fp8", data=block_codes(stored), scale=block_scales(stored), fp8_dialect=stored.fp8_dialect
        )
    if weight.scale is None:
        raise ShapeError(f"experts in {weight.format.value} of shape {weight.shape} have no scale")
    global_scale = weight.global_scale
    if global_scale is not None and global_scale.dim() == 2:
        if not torch.equal(global_scale[:, :1].expand_as(global_scale), global_scale):
            raise ShapeError("NVFP4 experts whose gate and up matrices differ in their global scale: store one scale")
        global_scale = global_scale[:, 0]
    return ExpertMatrices(
        format="fp4",
        data=weight.data.contiguous(),
        scale=weight.scale.contiguous().view(torch.uint8),
        global_scale=None if global_scale is None else global_scale.float().contiguous(),
    )


@implements(prepare_experts)
def prepare_experts_triton(
    gate_up: Weight, down: Weight, *, activation: Literal["none", "fp8_group128"]
) -> PreparedExperts:
    """See the contract."""
    check_stacks(gate_up, down)
    return TritonExperts(
        gate_up=_matrices(gate_up),
        down=_matrices(down),
        hidden=gate_up.shape[-1],
        rounds_input=activation == "fp8_group128" and gate_up.format not in _PLAIN,
    )


@implements(experts)
def experts_triton(x_TD: Tensor, routing: Routing, weights: PreparedExperts, *, limit: float) -> Tensor:
    """See the contract."""
    assert isinstance(weights, TritonExperts)
    if x_TD.shape[-1] != weights.hidden:
        raise ShapeError(f"rows of {x_TD.shape[-1]} lanes for experts of {weights.hidden}")
    if not x_TD.shape[0]:
        return torch.empty_like(x_TD)
    return run_experts(
        x_TD,
        routing.ids_TK.int().contiguous(),
        routing.weights_TK.contiguous(),
        weights.gate_up,
        weights.down,
        limit=limit,
        rounds_input=weights.rounds_input,
        target=target_of(x_TD.device),
        batch_invariant=False,
    )


@implements(route_by_score)
def route_by_score_triton(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
    """See the contract."""
    if bias_E.shape != logits_TE.shape[1:] or num_chosen > logits_TE.shape[1]:
        raise ShapeError(f"top {num_chosen} of logits {tuple(logits_TE.shape)} with a bias of {tuple(bias_E.shape)}")
    return Routing(*score_router.route_by_score(logits_TE, bias_E, num_chosen=num_chosen, scale=scale))


@implements(route_by_hash)
def route_by_hash_triton(logits_TE: Tensor, token_ids_T: Tensor, table_VK: Tensor, *, scale: float) -> Routing:
    """See the contract."""
    if token_ids_T.shape[0] != logits_TE.shape[0]:
        raise ShapeError(f"{token_ids_T.shape[0]} token ids for {logits_TE.shape[0]} rows of logits")
    return Routing(*hash_router.route_by_hash(logits_TE, token_ids_T, table_VK, scale=scale))


@implements(swiglu)
def swiglu_triton(gate_up_TI2: Tensor, *, limit: float) -> Tensor:
    """See the contract."""
    if gate_up_TI2.shape[-1] % 2:
        raise ShapeError(f"gate and up lanes together are odd: {gate_up_TI2.shape[-1]}")
    return activation_kernel.swiglu(gate_up_TI2, limit=limit).rows_PI
