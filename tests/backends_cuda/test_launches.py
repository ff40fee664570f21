"""What a wrapper starts on a device in a decode step: own kernels, operations of torch, calls of libraries.

At batch 1 a step is bound by their number. A view or an allocation starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halocline.backends_cuda import (
    attention_deep_gemm,
    attention_flashmla,
    gemm_deep_gemm,
    indexer_deep_gemm,
    moe_triton_kernels,
)
from halocline.backends_cuda.hyper_connection_flashinfer import read_flashinfer
from halocline.backends_triton.compressor_torch import allocate_state_torch
from halocline.backends_triton.compressor_triton import insert_triton
from halocline.backends_triton.hyper_connection_triton import write_triton
from halocline.backends_triton.indexer_triton import prepare_query_triton, select_triton
from halocline.backends_triton.kv_cache_triton import insert_window_triton
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops.moe import Routing
from halocline.hal.ops.rope import RopeTable
from halocline.hal.weight_codecs import quantize_weight
from halocline.kernels_portable.aot import recorded_launches

_STARTS_NOTHING = ("empty", "detach", "lift_fresh", "alias")


class _Operations(TorchDispatchMode):
    """Names of torch's operations that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not any(part in name for part in _STARTS_NOTHING):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def started(run: Callable[[], object]) -> list[str]:
    """Own kernels, then operations of torch."""
    with _Operations() as operations:
        launches = recorded_launches(run)
    return [launch.name for launch in launches] + operations.names


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of libraries, which compute nothing here."""
    found: list[str] = []

    def call(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return result(*args, **kwargs)

        return record

    library = SimpleNamespace(
        fp8_gemm_nt=call("fp8_gemm_nt", lambda *args, **kwargs: None),
        fp8_einsum=call("fp8_einsum", lambda *args, **kwargs: None),
        get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata=call("metadata", lambda *args: torch.empty(1)),
        fp8_paged_mqa_logits=call("logits", lambda q, *args, **kwargs: torch.empty(len(q), args[-1])),
    )
    for module in (gemm_deep_gemm, attention_deep_gemm, indexer_deep_gemm):
        monkeypatch.setattr(module, "deep_gemm", lambda: library)
    flash = SimpleNamespace(
        decode=call("decode", lambda q, *args, **kwargs: (torch.empty_like(q), torch.empty(len(q), q.shape[2], 1))),
        new_schedule=SimpleNamespace,
        options={},
    )
    monkeypatch.setattr(attention_flashmla, "flash_mla", lambda: flash)
    monkeypatch.setattr(attention_flashmla, "num_schedule_parts", lambda heads, device: 132)
    blocks = type("Blocks", (), {"__init__": lambda *args: None, "block_sizes": lambda: [16, 32, 64, 128]})
    products = SimpleNamespace(
        GatherIndx=SimpleNamespace,
        RoutingData=lambda gates, *args: SimpleNamespace(rows=len(gates)),
        matmul_ogs=call("matmul", lambda x, w, bias, routed, **kwargs: torch.empty(routed.rows, w)),
    )
    tensors = SimpleNamespace(RaggedTensorMetadata=blocks)
    experts = SimpleNamespace(products=products, tensors=tensors, constrain=lambda told: None)
    monkeypatch.setattr(moe_triton_kernels, "_library", lambda: experts)
    return found


def test_a_linear_is_two_launches(calls: list[str]) -> None:
    weight = gemm_deep_gemm.prepare_linear_deep_gemm(
        quantize_weight(normal(256, 256), WeightFormat.FP8_BLOCK), activation="fp8_group128"
    )
    one, two = normal(1, 256).bfloat16(), normal(2, 256).bfloat16()
    assert started(partial(gemm_deep_gemm.linear_deep_gemm, one, weight)) == ["quantize_activation", "thin_fp8_gemm"]
    assert calls == []
    assert started(partial(gemm_deep_gemm.linear_deep_gemm, two, weight)) == ["quantize_activation"]
    assert calls == ["fp8_gemm_nt"]


def test_a_few_rows_and_a_plain_matrix_are_one_launch() -> None:
    plain = Weight(data=normal(64, 256).bfloat16(), format=WeightFormat.BFLOAT16, shape=(64, 256))
    weight = gemm_deep_gemm.prepare_linear_deep_gemm(plain, activation="none")
    for rows in (1, 2):
        x = normal(rows, 256).bfloat16()
        run = partial(gemm_deep_gemm.linear_deep_gemm, x, weight, out_dtype=torch.float32)
        assert started(run) == ["thin_gemm"]
    assert started(partial(gemm_deep_gemm.linear_deep_gemm, normal(3, 256).bfloat16(), weight)) == ["mm"]


def test_the_grouped_projection_is_two_launches(calls: list[str], make_step: Callable[..., Any]) -> None:
    rope = RopeTable(cos_sin_PR=normal(2048, 64))
    weight = attention_deep_gemm.prepare_output_deep_gemm(
        quantize_weight(normal(2 * 128, 2 * 512), WeightFormat.FP8_BLOCK), activation="none"
    )

    def launches(tokens: int) -> list[str]:
        step, out = make_step([300], [tokens], num_decode=1), normal(tokens, 4, 512).bfloat16()
        return started(partial(attention_deep_gemm.output_deep_gemm, step.plan, out, rope, weight, num_groups=2))

    assert launches(1) == ["rotate_back", "thin_fp8_gemm"]
    assert calls == []
    assert launches(2) == ["rotate_back"]
    assert calls == ["fp8_einsum"]


def test_experts_are_six_launches_and_a_division(calls: list[str]) -> None:
    """The division of the gather index is the library's own and is not seen here."""
    weights = moe_triton_kernels.TritonKernelsExperts(
        num_experts=8, hidden=256, rounds_input=True, gate_up=512, gate_up_precision=None, down=256,
        down_precision=None,
    )  # fmt: skip
    routing = Routing(torch.tensor([[3, 1]], dtype=torch.int32), torch.ones(1, 2))
    x = normal(1, 256).bfloat16()
    run = partial(moe_triton_kernels.experts_triton_kernels, x, routing, weights, limit=10.0)
    assert started(run) == ["order_pairs", "quantize_activation", "swiglu", "sum_experts"]
    assert calls == ["matmul", "matmul"]


def test_attention_is_one_launch_and_a_schedule_for_each_class(calls: list[str], make_step: Callable[..., Any]) -> None:
    step = make_step([300], [1], num_decode=1)
    q, sink = normal(1, 64, 512).bfloat16(), torch.zeros(64)

    def layer(cache: Any, rows: Any) -> list[str]:
        arguments = (step.plan, q, step.window, step.plan.window_rows, cache, rows, sink)
        return started(lambda: attention_flashmla.sparse_decode_flashmla(*arguments, scale=0.05))

    rows = step.plan.all_rows[128]
    wide = type(rows)(torch.full((1, 64), -1, dtype=torch.int32), rows.lengths_T)
    assert [layer(None, None), layer(None, None)] == [["split_schedule"], []]
    assert [layer(step.compressed, wide), layer(step.compressed, wide)] == [["split_schedule"], []]
    assert calls == ["decode"] * 4


def test_index_logits_read_their_plan_once(calls: list[str], make_step: Callable[..., Any]) -> None:
    step = make_step([1500], [1], num_decode=1)
    rope = RopeTable(cos_sin_PR=normal(2048, 64))
    q, weights = normal(1, 64, 128).bfloat16(), normal(1, 64)
    query = None

    def prepare() -> None:
        nonlocal query
        query = prepare_query_triton(step.plan, q, weights, rope, rounding="fp8_row")

    assert started(prepare) == ["index_query"]
    run = partial(indexer_deep_gemm.logits_deep_gemm, step.plan, query, step.keys, first_token=0)
    assert len(started(run)) == 4
    assert started(run) == []
    assert calls == ["metadata", "logits", "logits"]
    select = partial(select_triton, step.plan, torch.empty(1, 375), first_token=0, num_kept=64, page_rows=64)
    assert started(select) == ["select_entries"]


def test_caches_and_streams(make_step: Callable[..., Any]) -> None:
    step = make_step([512], [1], num_decode=1)
    rope = RopeTable(cos_sin_PR=normal(2048, 64))
    gain = torch.ones(512)
    kv = normal(1, 512).bfloat16()
    run = partial(insert_window_triton, step.plan, kv, gain, rope, step.window, eps=1e-6)
    assert started(run) == ["insert_window"]
    state = allocate_state_torch(1, 512, ratio=128, extra_rows=0, device="cpu")
    projected, bias = normal(1, 1024), normal(128, 512)
    arguments = (*projected.chunk(2, dim=-1), bias, gain, rope, state, step.compressed)
    insert = partial(insert_triton, step.plan, *arguments, eps=1e-6)
    assert started(insert) == ["insert_entries", "zeros"]  # zeros for the arrivals of the step
    assert started(insert) == ["insert_entries"]
    assert [launch.grid for launch in recorded_launches(insert)] == [(1, 16)]
    streams, matrix = normal(128, 4, 512).bfloat16(), normal(24, 4 * 512)
    read = partial(
        read_flashinfer, streams, matrix, normal(24), normal(3), norm_eps=1e-6, hc_eps=1e-6, sinkhorn_iterations=20
    )
    assert started(read)[:2] == ["mix_streams", "read_streams"]
    written = (normal(128, 512).bfloat16(), streams, torch.ones(128, 4), torch.ones(128, 4, 4))
    assert started(lambda: write_triton(*written)) == ["write_streams"]
