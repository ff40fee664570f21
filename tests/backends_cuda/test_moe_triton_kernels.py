"""The adapter over triton_kernels against the reference, with a stand-in for its products and tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_cuda import moe_triton_kernels
from halocline.backends_reference.gemm import round_activation
from halocline.backends_reference.moe import _swiglu, experts_reference, prepare_experts_reference
from halocline.hal.codecs import decode_e2m1, decode_ue8m0
from halocline.hal.errors import ShapeError
from halocline.hal.formats import WeightFormat
from halocline.hal.ops.moe import Routing
from halocline.hal.weight_codecs import quantize_weight
from halocline.kernels_portable.expert_order import PairOrder


class Products:
    """`matmul_ogs` over rows that are sorted by expert: gathers on the way in, or scatters and sums on the way out."""

    GatherIndx = ScatterIndx = PrecisionConfig = FlexCtx = staticmethod(SimpleNamespace)

    @staticmethod
    def RoutingData(gates: Tensor, counts: Tensor, experts: int, chosen: int, ragged: Any) -> SimpleNamespace:
        assert counts.dtype == torch.int32
        assert ragged == int(counts.sum()) == len(gates)
        return SimpleNamespace(counts=counts, experts=experts, chosen=chosen)

    @staticmethod
    def matmul_ogs(
        x: Tensor, w: Tensor, bias: None, routed: Any, *, gather_indx: Any = None, scatter_indx: Any = None,
        precision_config: Any,
    ) -> Tensor:  # fmt: skip
        scale = decode_ue8m0(precision_config.weight_scale.transpose(-2, -1))
        codes = decode_e2m1(w.transpose(-2, -1).contiguous())
        matrices = codes * scale.repeat_interleave(32, -1)
        owners = torch.repeat_interleave(torch.arange(routed.experts), routed.counts.long())
        rows = x if gather_indx is None else x[gather_indx.src_indx.long() // routed.chosen]
        if gather_indx is not None:
            order, inverse = gather_indx.src_indx.long(), gather_indx.dst_indx.long()
            assert torch.equal(order[inverse], torch.arange(len(order)))
        out = torch.einsum("pk,pnk->pn", rows.float(), matrices[owners]).to(x.dtype)
        if scatter_indx is None:
            return out
        unsorted = out[scatter_indx.src_indx.long()]
        return unsorted.view(-1, routed.chosen, out.shape[1]).float().sum(1).to(x.dtype)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = SimpleNamespace(
        FP4="fp4",
        wrap_torch_tensor=lambda t, dtype=None: t,
        convert_layout=lambda t, layout: t,
        make_ragged_tensor_metadata=lambda counts, total: total,
    )
    layouts = SimpleNamespace(
        make_default_matmul_mxfp4_w_layout=lambda mx_axis: ("values", {}),
        make_default_matmul_mxfp4_w_scale_layout=lambda mx_axis, num_warps: ("scales", {}),
    )
    library = SimpleNamespace(products=Products, tensors=tensors, layouts=layouts, plain=SimpleNamespace)
    monkeypatch.setattr(moe_triton_kernels, "_library", lambda: library)
    monkeypatch.setattr(moe_triton_kernels, "round_activation", lambda x: round_activation(x.float()).to(x.dtype))

    def order_pairs(ids: Tensor, weights: Tensor, *, num_experts: int) -> PairOrder:
        served = ids.flatten().clamp_min(0)
        order = torch.sort(served, stable=True).indices
        sorted_weights = torch.where(ids < 0, 0.0, weights).flatten()[order]
        counts = torch.bincount(served, minlength=num_experts).int()
        return PairOrder(order.int(), torch.argsort(order).int(), sorted_weights, counts)

    monkeypatch.setattr(moe_triton_kernels, "order_pairs", order_pairs)

    def swiglu(gate_up: Tensor, *, limit: float, weights_P: Tensor, ids_P: Tensor, dtype: Any, rounding: str) -> Any:
        assert bool((ids_P >= 0).all())
        u = (_swiglu(gate_up, limit) * weights_P[:, None]).to(dtype)
        return SimpleNamespace(rows_PI=round_activation(u.float()).to(dtype) if rounding == "values" else u)

    monkeypatch.setattr(moe_triton_kernels, "swiglu", swiglu)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Between the products the library gives bfloat16, which may flip a step of the rounding to E4M3.
@pytest.mark.parametrize(("activation", "bound"), [("none", 8e-3), ("fp8_group128", 2.5e-2)])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_experts(activation: Any, bound: float, num_tokens: int) -> None:
    gate_up = quantize_weight(normal(4, 2 * 64, 128, seed=1) / 11, WeightFormat.MXFP4)
    down = quantize_weight(normal(4, 128, 64, seed=2) / 8, WeightFormat.MXFP4)
    x = normal(num_tokens, 128, seed=3).bfloat16()
    ids = torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(4)).topk(3).indices.int()
    ids[-1, 1] = -1  # an expert of another rank
    routing = Routing(ids, normal(num_tokens, 3, seed=5).abs())
    ours = moe_triton_kernels.prepare_experts_triton_kernels(gate_up, down, activation=activation)
    theirs = prepare_experts_reference(gate_up, down, activation=activation)
    found = moe_triton_kernels.experts_triton_kernels(x, routing, ours, limit=2.0)
    expected = experts_reference(x, routing, theirs, limit=2.0)
    assert ours.num_experts == 4
    assert found.shape == expected.shape
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < bound


def test_no_tokens() -> None:
    gate_up = quantize_weight(normal(2, 64, 32, seed=1), WeightFormat.MXFP4)
    down = quantize_weight(normal(2, 32, 32, seed=2), WeightFormat.MXFP4)
    ours = moe_triton_kernels.prepare_experts_triton_kernels(gate_up, down, activation="none")
    empty = Routing(torch.zeros((0, 2), dtype=torch.int32), torch.zeros((0, 2)))
    assert moe_triton_kernels.experts_triton_kernels(torch.zeros(0, 32), empty, ours, limit=0.0).shape == (0, 32)


def test_other_formats_are_refused() -> None:
    gate_up = quantize_weight(normal(2, 64, 32, seed=1), WeightFormat.NVFP4)
    with pytest.raises(ShapeError, match="bound for mxfp4"):
        moe_triton_kernels.prepare_experts_triton_kernels(
            gate_up, quantize_weight(normal(2, 32, 32, seed=2), WeightFormat.NVFP4), activation="none"
        )
