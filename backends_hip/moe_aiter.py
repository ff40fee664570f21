"""Routing and routed experts by aiter. Shapes as in `halocline.hal.ops.moe`.

Written after the recorded calls; never run. `fused_moe` weighs an expert's result after the down product, where the
model weighs its input: the manifest says so, and selection refuses it for models that demand the other order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halocline.backends_hip.library_calls import library_function
from halocline.backends_hip.manifest import AITER
from halocline.backends_triton.block_scales import block_codes, block_scales
from halocline.backends_triton.device_facts import in_dialect_of
from halocline.backends_triton.moe_triton import check_stacks
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.op import implements
from halocline.hal.ops.moe import PreparedExperts, Routing, experts, prepare_experts, route_by_score
from halocline.hal.runtime import import_provider

__all__ = ["AiterExperts", "experts_aiter", "prepare_experts_aiter", "route_by_score_aiter"]

_fused_moe = library_function("fused_moe")
_topk_gating = library_function("topk_gating")


@dataclass(frozen=True, eq=False, kw_only=True)
class AiterExperts:
    """FP8 experts in the dialect of their device: codes and float32 scales of gate and up, and of down."""

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]

    @property
    def num_experts(self) -> int:
        """Experts held."""
        return int(self.gate_up[0].shape[0])


@implements(prepare_experts)
def prepare_experts_aiter(
    gate_up: Weight, down: Weight, *, activation: Literal["none", "fp8_group128"]
) -> PreparedExperts:
    """See the contract."""
    check_stacks(gate_up, down)
    if {gate_up.format, down.format} != {WeightFormat.FP8_BLOCK} or activation != "fp8_group128":
        raise ShapeError(
            f"experts in {gate_up.format.value} with {activation} inputs: this kernel takes FP8 with rounded inputs"
        )
    stored = [in_dialect_of(weight, weight.data.device) for weight in (gate_up, down)]
    codes_and_scales = [(block_codes(weight), block_scales(weight)) for weight in stored]
    return AiterExperts(gate_up=codes_and_scales[0], down=codes_and_scales[1])


@implements(experts)
def experts_aiter(x_TD: Tensor, routing: Routing, weights: PreparedExperts, *, limit: float) -> Tensor:
    """See the contract."""
    assert isinstance(weights, AiterExperts)
    if x_TD.shape[-1] != weights.gate_up[0].shape[-1]:
        raise ShapeError(f"rows of {x_TD.shape[-1]} lanes for experts of {weights.gate_up[0].shape[-1]}")
    if not x_TD.shape[0]:
        return torch.empty_like(x_TD)
    library = import_provider(AITER)
    out_TD: Tensor = _fused_moe(
        hidden_states=x_TD.contiguous(),
        w1=weights.gate_up[0],
        w2=weights.down[0],
        topk_weight=routing.weights_TK.contiguous(),
        topk_ids=routing.ids_TK.int().contiguous(),
        activation=library.ActivationType.Silu,
        quant_type=library.QuantType.per_1x128,
        w1_scale=weights.gate_up[1],
        w2_scale=weights.down[1],
        swiglu_limit=limit,
    )
    return out_TD


@implements(route_by_score)
def route_by_score_aiter(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
    """See the contract."""
    if bias_E.shape != logits_TE.shape[1:] or num_chosen > logits_TE.shape[1]:
        raise ShapeError(f"top {num_chosen} of logits {tuple(logits_TE.shape)} with a bias of {tuple(bias_E.shape)}")
    shape = (logits_TE.shape[0], num_chosen)
    weights_TK = torch.empty(shape, dtype=torch.float32, device=logits_TE.device)
    ids_TK = torch.empty(shape, dtype=torch.int32, device=logits_TE.device)
    if shape[0]:
        _topk_gating(
            topk_weights=weights_TK,
            topk_indices=ids_TK,
            gating_output=logits_TE.float().contiguous(),
            correction_bias=bias_E.float(),
            need_renorm=True,
            routed_scaling_factor=scale,
            score_func="sqrtsoftplus",
        )
    return Routing(ids_TK, weights_TK.nan_to_num_(nan=0.0))  # scores that vanish together: the contract wants zeros
