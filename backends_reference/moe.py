"""Reference mixture of experts. Shapes as in `halocline.hal.ops.moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from halocline.backends_reference.gemm import dequantize, round_activation
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

__all__ = [
    "ReferenceExperts",
    "experts_reference",
    "prepare_experts_reference",
    "route_by_hash_reference",
    "route_by_score_reference",
    "swiglu_reference",
]

_SMALLEST_SUM = 1e-20


@dataclass(frozen=True, eq=False, kw_only=True)
class ReferenceExperts:
    """float32 matrices of all experts of a layer, and whether inputs of both products are rounded."""

    gate_up_E2ID: Tensor
    down_EDI: Tensor
    rounds_input: bool

    @property
    def num_experts(self) -> int:
        """Experts held."""
        return int(self.gate_up_E2ID.shape[0])


def _weigh(scores_TE: Tensor, ids_TK: Tensor, scale: float) -> Routing:
    chosen_TK = scores_TE.gather(1, ids_TK.long())
    total_T1 = chosen_TK.sum(-1, keepdim=True).clamp_min(_SMALLEST_SUM)
    return Routing(ids_TK.int(), chosen_TK / total_T1 * scale)


def _scores(logits_TE: Tensor) -> Tensor:
    return softplus(logits_TE.float()).sqrt()


@implements(route_by_score)
def route_by_score_reference(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
    """See the contract."""
    if bias_E.shape != logits_TE.shape[1:] or num_chosen > logits_TE.shape[1]:
        raise ShapeError(f"top {num_chosen} of logits {tuple(logits_TE.shape)} with a bias of {tuple(bias_E.shape)}")
    scores_TE = _scores(logits_TE)
    return _weigh(scores_TE, (scores_TE + bias_E.float()).topk(num_chosen, dim=-1).indices, scale)


@implements(route_by_hash)
def route_by_hash_reference(logits_TE: Tensor, token_ids_T: Tensor, table_VK: Tensor, *, scale: float) -> Routing:
    """See the contract."""
    if token_ids_T.shape[0] != logits_TE.shape[0]:
        raise ShapeError(f"{token_ids_T.shape[0]} token ids for {logits_TE.shape[0]} rows of logits")
    return _weigh(_scores(logits_TE), table_VK[token_ids_T.long()], scale)


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


@implements(swiglu)
def swiglu_reference(gate_up_TI2: Tensor, *, limit: float) -> Tensor:
    """See the contract."""
    if gate_up_TI2.shape[-1] % 2:
        raise ShapeError(f"gate and up lanes together are odd: {gate_up_TI2.shape[-1]}")
    return _swiglu(gate_up_TI2, limit).to(gate_up_TI2.dtype)


@implements(prepare_experts)
def prepare_experts_reference(
    gate_up: Weight, down: Weight, *, activation: Literal["none", "fp8_group128"]
) -> PreparedExperts:
    """See the contract."""
    (e, two_i, d), (e_down, d_down, i) = gate_up.shape, down.shape
    if (e, d, two_i) != (e_down, d_down, 2 * i):
        raise ShapeError(f"experts of gate and up {gate_up.shape} do not fit down {down.shape}")
    plain = gate_up.format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16)
    return ReferenceExperts(
        gate_up_E2ID=dequantize(gate_up),
        down_EDI=dequantize(down),
        rounds_input=activation == "fp8_group128" and not plain,
    )


@implements(experts)
def experts_reference(x_TD: Tensor, routing: Routing, weights: PreparedExperts, *, limit: float) -> Tensor:
    """See the contract."""
    assert isinstance(weights, ReferenceExperts)
    if x_TD.shape[-1] != weights.gate_up_E2ID.shape[-1]:
        raise ShapeError(f"rows of {x_TD.shape[-1]} lanes for experts of {weights.gate_up_E2ID.shape[-1]}")
    x = round_activation(x_TD.float()) if weights.rounds_input else x_TD.float()
    y_TD = torch.zeros_like(x)
    for expert in routing.ids_TK.unique().tolist():
        if expert < 0:
            continue
        tokens, places = (routing.ids_TK == expert).nonzero(as_tuple=True)
        u = _swiglu(x[tokens] @ weights.gate_up_E2ID[expert].T, limit) * routing.weights_TK[tokens, places, None]
        u = u.to(x_TD.dtype).float()
        if weights.rounds_input:
            u = round_activation(u)
        y_TD = y_TD.index_add(0, tokens, u @ weights.down_EDI[expert].T)
    return y_TD.to(x_TD.dtype)
