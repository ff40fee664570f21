"""MXFP4 experts by the package triton_kernels (0.4.5's API). Shapes as in `halocline.hal.ops.moe`.

Weights go into the library's layouts for Hopper, once, at load. Its fused activation is another model's, so that ours
runs between the two products; the routing weight is applied there, not in the sum. Its own order of pairs takes three
launches and its sum over a token's experts a tile of 64 tokens, so that both are ours.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from halocline.backends_cuda.manifest import TRITON_KERNELS
from halocline.backends_triton.moe_triton import check_stacks
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.op import implements
from halocline.hal.ops.moe import PreparedExperts, Routing, experts, prepare_experts
from halocline.hal.runtime import import_provider
from halocline.kernels_portable.expert_order import BLOCK_SIZES, PairOrder, order_pairs
from halocline.kernels_portable.expert_sum import sum_experts
from halocline.kernels_portable.quantize_activation import round_activation
from halocline.kernels_portable.swiglu import swiglu

__all__ = ["TritonKernelsExperts", "experts_triton_kernels", "prepare_experts_triton_kernels"]

_WHOLE_BLOCKS = 16
_PART_BYTES = 64 << 20  # of a stack that are converted at a time
_STEP_SCALES = 4  # scales of a step over K: the library reads them whole, also behind the last one
_WARPS = 4  # of a program, which then has 128 output lanes: few experts occupy more of the device than with 8
_MANY_ROWS = 64  # of an expert on average; with more, the library takes tiles of 128 rows
_STAGES = 3  # of the pipeline of such tiles, where the library takes more: 8,192 tokens of Flash in 5.7 ms, not 7.0


@functools.cache
def _library() -> Any:
    """The names that are used, with the library told once to keep a product's sum in one place."""
    import_provider(TRITON_KERNELS)
    products = import_module("triton_kernels.matmul_ogs")
    tensors = import_module("triton_kernels.tensor")
    flags = import_module("triton_kernels.matmul_ogs_details.opt_flags")
    flags.update_opt_flags_constraints({"split_k": 1})
    return SimpleNamespace(
        constrain=flags.update_opt_flags_constraints,
        products=products,
        tensors=tensors,
        layouts=import_module("triton_kernels.tensor_details.layout"),
        plain=import_module("triton_kernels.numerics").InFlexData,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class TritonKernelsExperts:
    """Experts in the library's layouts: tensors of its own type and what it calls the precision of a product."""

    num_experts: int
    hidden: int
    rounds_input: bool
    gate_up: Any
    gate_up_precision: Any
    down: Any
    down_precision: Any


def _convert(weight: Weight, out_dtype: torch.dtype) -> tuple[Any, Any]:
    """A stack (experts, out, in) as the library wants it: K first, codes and scales in their Hopper layouts.

    Scales are padded to whole steps over K. What the library would read there otherwise is the memory behind them, and
    a byte of 255 turns the zeros that it multiplies with into NaN.
    """
    if weight.format is not WeightFormat.MXFP4 or weight.scale is None:
        raise ShapeError(f"experts in {weight.format.value}: triton_kernels is bound for mxfp4")
    library = _library()
    layout, options = library.layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = library.layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=_WARPS)
    codes = weight.data.contiguous().view(torch.uint8).transpose(-2, -1)
    scales = weight.scale.contiguous().view(torch.uint8)
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % _STEP_SCALES)).transpose(-2, -1)
    data = _in_layout(library.tensors, codes, library.tensors.FP4, layout, options)
    scale = _in_layout(library.tensors, scales, torch.uint8, scale_layout, scale_options)
    products = library.products
    flex = products.FlexCtx(rhs_data=library.plain())
    return data, products.PrecisionConfig(weight_scale=scale, flex_ctx=flex, out_dtype=out_dtype)


def _in_layout(tensors: Any, stored_EKN: Tensor, dtype: Any, layout: Any, options: Mapping[str, Any]) -> Any:
    """What the library's `convert_layout` makes of a stack of bytes, made of a few experts at a time.

    The library keeps each byte as an int32 several times over on the way: 18 GiB for the gate and up matrices of a
    Flash layer. Its layouts treat each expert by itself, so that parts put side by side are the same bytes. Beside the
    stack and the result this takes at most ten times `_PART_BYTES`, or ten times an expert if that is more.
    """
    num_experts = stored_EKN.shape[0]
    step = max(1, _PART_BYTES // stored_EKN[0].numel())

    def converted(first: int) -> Tensor:
        few = tensors.wrap_torch_tensor(stored_EKN[first : first + step], dtype=dtype)
        part: Tensor = tensors.convert_layout(few, layout, **options).storage.data
        return part

    part = converted(0)
    # As the library leaves a whole stack: experts one behind the other, lanes of each in an order of its own.
    whole = part.new_empty_strided((num_experts, *part.shape[1:]), (part[0].numel(), *part.stride()[1:]))
    whole[:step] = part
    del part
    for first in range(step, num_experts, step):
        whole[first : first + step] = converted(first)
    storage = tensors.Storage(whole, layout(stored_EKN.shape, **options))
    return replace(tensors.wrap_torch_tensor(stored_EKN, dtype=dtype), storage=storage)


@implements(prepare_experts)
def prepare_experts_triton_kernels(
    gate_up: Weight, down: Weight, *, activation: Literal["none", "fp8_group128"]
) -> PreparedExperts:
    """See the contract."""
    check_stacks(gate_up, down)
    gate_up_data, gate_up_precision = _convert(gate_up, torch.float32)  # it is rounded once, after the activation
    down_data, down_precision = _convert(down, torch.bfloat16)
    return TritonKernelsExperts(
        num_experts=gate_up.shape[0],
        hidden=gate_up.shape[-1],
        rounds_input=activation == "fp8_group128",
        gate_up=gate_up_data,
        gate_up_precision=gate_up_precision,
        down=down_data,
        down_precision=down_precision,
    )


def _routed(library: Any, pairs: PairOrder, num_chosen: int) -> Any:
    """The library's record of which rows are whose, from tables that have its form already."""
    num_experts = pairs.counts_E.shape[0]
    metadata = library.tensors.RaggedTensorMetadata
    assert tuple(metadata.block_sizes()) == BLOCK_SIZES
    blocks = metadata(pairs.counts_E, pairs.starts_SE[0], pairs.starts_SE[1:], pairs.blocks_SB)
    routed = library.products.RoutingData(pairs.weights_P, pairs.counts_E, num_experts, num_chosen, blocks)
    routed.n_blocks = functools.partial(_num_blocks, num_experts)
    return routed


def _num_blocks(num_experts: int, num_rows: int, block_rows: int) -> int:
    """The library's bound on blocks of rows, but a multiple of 16 where there are many.

    It is an argument of the kernel, for which Triton compiles multiples of 16 apart: so, big steps all have one kernel.
    A program behind the last block ends at once.
    """
    if num_rows <= num_experts:
        return num_rows
    most = -(-(num_rows - num_experts + 1) // block_rows) + num_experts - 1
    return -(-most // _WHOLE_BLOCKS) * _WHOLE_BLOCKS


@implements(experts)
def experts_triton_kernels(x_TD: Tensor, routing: Routing, weights: PreparedExperts, *, limit: float) -> Tensor:
    """See the contract."""
    assert isinstance(weights, TritonKernelsExperts)
    if x_TD.shape[-1] != weights.hidden:
        raise ShapeError(f"rows of {x_TD.shape[-1]} lanes for experts of {weights.hidden}")
    num_tokens, num_chosen = routing.ids_TK.shape
    if not num_tokens:
        return torch.empty_like(x_TD)
    library = _library()
    products = library.products
    has_many = num_tokens * num_chosen // weights.num_experts > _MANY_ROWS
    library.constrain({"num_stages": _STAGES if has_many else None})
    ids_TK = routing.ids_TK.int().contiguous()
    pairs = order_pairs(ids_TK, routing.weights_TK.float().contiguous(), num_experts=weights.num_experts)
    routed = _routed(library, pairs, num_chosen)
    gate_up_PI2 = products.matmul_ogs(
        round_activation(x_TD) if weights.rounds_input else x_TD.contiguous(),
        weights.gate_up,
        None,
        routed,
        gather_indx=products.GatherIndx(src_indx=pairs.order_P, dst_indx=pairs.places_P),
        precision_config=weights.gate_up_precision,
    )
    activated = swiglu(
        gate_up_PI2,
        limit=limit,
        weights_P=pairs.weights_P,
        ids_P=pairs.order_P,
        dtype=x_TD.dtype,
        rounding="values" if weights.rounds_input else "none",
    )
    y_PD: Tensor = products.matmul_ogs(
        activated.rows_PI, weights.down, None, routed, precision_config=weights.down_precision
    )
    return sum_experts(y_PD, ids_TK, out_dtype=x_TD.dtype, places_P=pairs.places_P)
