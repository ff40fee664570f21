"""The adapter over triton_kernels against the reference, with a stand-in for its products and tensors."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Blocks:
    """`RaggedTensorMetadata`: sizes and starts of the experts' rows; blocks of rows are `test_moe.py`'s to check."""

    slice_sizes: Tensor
    slice_offs: Tensor
    block_offs_data: Tensor
    block_schedule_data: Tensor

    @staticmethod
    def block_sizes() -> list[int]:
        return [16, 32, 64, 128]


@dataclass
class Layout:
    """Lanes over K of each expert from the last to the first, K fastest in memory, and a few bytes of room behind N."""

    initial_shape: torch.Size
    mx_axis: int

    def swizzle_data(self, data_EKN: Tensor) -> Tensor:
        return torch.nn.functional.pad(data_EKN.flip(-2), (0, 3)).mT.contiguous().mT

    def unswizzle_data(self, data_EKM: Tensor) -> Tensor:
        return data_EKM[..., : self.initial_shape[-1]].flip(-2)


@dataclass
class Storage:
    data: Tensor
    layout: Layout | None = None


@dataclass
class Stored:
    """The library's `Tensor`."""

    storage: Storage
    dtype: Any
    shape: list[int]
    shape_max: list[int]

    def values(self) -> Tensor:
        assert self.storage.layout is not None
        return self.storage.layout.unswizzle_data(self.storage.data)


class Tensors:
    """`triton_kernels.tensor`; it notes how many experts it converts at a time."""

    FP4 = "fp4"
    RaggedTensorMetadata: Any = Blocks
    Storage = Storage

    def __init__(self) -> None:
        self.converted: list[int] = []

    @staticmethod
    def wrap_torch_tensor(data: Tensor, dtype: Any = None) -> Stored:
        shape = list(data.shape)
        shape[data.stride().index(1)] *= 2 if dtype == "fp4" else 1
        return Stored(Storage(data), dtype or data.dtype, shape, list(shape))

    def convert_layout(self, tensor: Stored, layout: type[Layout], **options: int) -> Stored:
        data = tensor.storage.data
        self.converted.append(len(data))
        found = layout(data.shape, **options)
        return Stored(Storage(found.swizzle_data(data), found), tensor.dtype, tensor.shape, tensor.shape_max)


class Products:
    """`matmul_ogs` over rows that are sorted by expert; it may gather on the way in."""

    GatherIndx = PrecisionConfig = FlexCtx = staticmethod(SimpleNamespace)

    @staticmethod
    def RoutingData(gates: Tensor, counts: Tensor, experts: int, chosen: int, blocks: Blocks) -> SimpleNamespace:
        assert counts.dtype == torch.int32
        assert blocks.slice_sizes is counts
        return SimpleNamespace(counts=counts, starts=blocks.slice_offs, experts=experts, chosen=chosen, rows=len(gates))

    @staticmethod
    def matmul_ogs(
        x: Tensor, w: Stored, bias: None, routed: Any, *, gather_indx: Any = None, precision_config: Any
    ) -> Tensor:
        codes = decode_e2m1(w.values().transpose(-2, -1).contiguous())
        scales = precision_config.weight_scale.values().transpose(-2, -1)
        assert scales.shape[-1] % 4 == 0  # a step over K reads four
        used = codes.shape[-1] // 32
        assert not scales[..., used:].any()
        matrices = codes * decode_ue8m0(scales[..., :used].contiguous()).repeat_interleave(32, -1)
        out = torch.full((routed.rows, matrices.shape[1]), torch.nan, dtype=precision_config.out_dtype)
        for expert in range(routed.experts):
            rows = torch.arange(int(routed.starts[expert]), int(routed.starts[expert + 1]))
            assert len(rows) == int(routed.counts[expert])
            source = rows if gather_indx is None else gather_indx.src_indx[rows].long() // routed.chosen
            out[rows] = (x[source].float() @ matrices[expert].T).to(out.dtype)
        return out


@pytest.fixture(autouse=True)
def constraints(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """The library's stand-in; gives what it was told about its products, which it keeps from call to call."""
    told: dict[str, int | None] = {}
    layouts = SimpleNamespace(
        make_default_matmul_mxfp4_w_layout=lambda mx_axis: (Layout, {"mx_axis": mx_axis}),
        make_default_matmul_mxfp4_w_scale_layout=lambda mx_axis, num_warps: (Layout, {"mx_axis": mx_axis}),
    )
    library = SimpleNamespace(
        products=Products, tensors=Tensors(), layouts=layouts, plain=SimpleNamespace, constrain=told.update
    )
    monkeypatch.setattr(moe_triton_kernels, "_library", lambda: library)
    monkeypatch.setattr(moe_triton_kernels, "round_activation", lambda x: round_activation(x.float()).to(x.dtype))

    def order_pairs(ids: Tensor, weights: Tensor, *, num_experts: int) -> PairOrder:
        flat = ids.flatten()
        order = torch.sort(torch.where(flat < 0, num_experts, flat), stable=True).indices
        served = int((flat >= 0).sum())
        places = torch.argsort(order).masked_fill(flat < 0, -1)
        counts = torch.bincount(flat[flat >= 0], minlength=num_experts).int()
        starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().expand(5, -1)
        sorted_weights = weights.flatten()[order]
        sorted_weights[served:] = 0
        order[served:] = -1
        return PairOrder(order.int(), places.int(), sorted_weights, counts, starts, torch.empty(4, 0))

    monkeypatch.setattr(moe_triton_kernels, "order_pairs", order_pairs)

    def swiglu(gate_up: Tensor, *, limit: float, weights_P: Tensor, ids_P: Tensor, dtype: Any, rounding: str) -> Any:
        assert gate_up.dtype == torch.float32
        u = (_swiglu(gate_up, limit) * weights_P[:, None]).to(dtype)
        u[ids_P < 0] = torch.nan
        return SimpleNamespace(rows_PI=round_activation(u.float()).to(dtype) if rounding == "values" else u)

    monkeypatch.setattr(moe_triton_kernels, "swiglu", swiglu)

    def sum_experts(y: Tensor, ids: Tensor, *, out_dtype: Any, places_P: Tensor) -> Tensor:
        assert torch.equal(places_P < 0, ids.flatten() < 0)
        rows = torch.where((places_P >= 0)[:, None], y[places_P.long()].float(), 0.0)
        return rows.view(*ids.shape, -1).sum(1).to(out_dtype)

    monkeypatch.setattr(moe_triton_kernels, "sum_experts", sum_experts)
    return told


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activation", ["none", "fp8_group128"])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 128), (7, 128), (7, 64)])
def test_experts(activation: Any, num_tokens: int, hidden: int) -> None:
    gate_up = quantize_weight(normal(4, 2 * 64, hidden, seed=1) / 11, WeightFormat.MXFP4)
    down = quantize_weight(normal(4, hidden, 64, seed=2) / 8, WeightFormat.MXFP4)
    x = normal(num_tokens, hidden, seed=3).bfloat16()
    ids = torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(4)).topk(3).indices.int()
    ids[-1, 1] = -1  # an expert of another rank
    routing = Routing(ids, normal(num_tokens, 3, seed=5).abs())
    ours = moe_triton_kernels.prepare_experts_triton_kernels(gate_up, down, activation=activation)
    theirs = prepare_experts_reference(gate_up, down, activation=activation)
    found = moe_triton_kernels.experts_triton_kernels(x, routing, ours, limit=2.0)
    expected = experts_reference(x, routing, theirs, limit=2.0)
    assert ours.num_experts == 4
    assert found.shape == expected.shape
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 8e-3


@pytest.mark.parametrize("part_experts", [1, 2, 3, 7, 8])
def test_parts_of_a_stack_give_what_the_whole_gives(part_experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, num_experts = Tensors(), 7
    generator = torch.Generator().manual_seed(1)
    stored_EKN = torch.randint(0, 256, (num_experts, 6, 16), dtype=torch.uint8, generator=generator).mT
    whole = tensors.convert_layout(tensors.wrap_torch_tensor(stored_EKN, dtype="fp4"), Layout, mx_axis=1)
    tensors.converted.clear()
    monkeypatch.setattr(moe_triton_kernels, "_PART_BYTES", part_experts * 6 * 16 + 5)
    found = moe_triton_kernels._in_layout(tensors, stored_EKN, "fp4", Layout, {"mx_axis": 1})
    assert max(tensors.converted) == min(part_experts, num_experts)
    assert sum(tensors.converted) == num_experts
    assert torch.equal(found.storage.data, whole.storage.data)
    assert found.storage.data.stride() == whole.storage.data.stride()
    assert found.storage.data.untyped_storage().nbytes() == whole.storage.data.untyped_storage().nbytes()
    assert found.storage.layout == whole.storage.layout
    assert (found.dtype, found.shape, found.shape_max) == (whole.dtype, whole.shape, whole.shape_max)
    assert found.shape == [num_experts, 2 * 16, 6]


def test_an_expert_beyond_a_part_is_converted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Tensors()
    monkeypatch.setattr(moe_triton_kernels, "_PART_BYTES", 1)
    moe_triton_kernels._in_layout(tensors, torch.ones((3, 6, 16), dtype=torch.uint8).mT, "fp4", Layout, {"mx_axis": 1})
    assert tensors.converted == [1, 1, 1]


def test_large_tiles_have_a_short_pipeline_and_small_ones_the_librarys(constraints: dict[str, int | None]) -> None:
    gate_up = quantize_weight(normal(2, 64, 32, seed=1), WeightFormat.MXFP4)
    down = quantize_weight(normal(2, 32, 32, seed=2), WeightFormat.MXFP4)
    ours = moe_triton_kernels.prepare_experts_triton_kernels(gate_up, down, activation="none")
    for num_tokens, wanted in [(65, 3), (64, None), (1, None)]:
        routing = Routing(torch.tensor([[0, 1]] * num_tokens, dtype=torch.int32), torch.ones(num_tokens, 2))
        moe_triton_kernels.experts_triton_kernels(normal(num_tokens, 32, seed=3), routing, ours, limit=0.0)
        assert constraints["num_stages"] == wanted


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


@pytest.mark.parametrize("experts", [8, 256, 384])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_many_rows_have_a_whole_number_of_blocks(experts: int, block: int) -> None:
    """Enough for any division of the rows among experts, and never one more than a kernel's next multiple of 16."""
    for rows in (experts - 1, experts, experts + 1, 2 * experts + 3, 50_000):
        found = moe_triton_kernels._num_blocks(experts, rows, block)
        worst = min(rows, experts) + max(rows - experts, 0) // block  # a row for each expert, the rest in whole blocks
        if rows <= experts:
            assert found == rows == worst
        else:
            assert found % 16 == 0
            assert worst <= found <= worst + 16
