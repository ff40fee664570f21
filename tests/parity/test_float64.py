"""Every small input of every op: the reference against the same formula in float64, by the op's own tolerance.

The formulas of `float64_*.py` share nothing with the package. They are bound like kernels of a backend, so that this
also runs the parity runner itself, on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from halocline.backends_reference.manifest import MANIFEST
from halocline.hal.offline import Workbench, load_cases
from halocline.hal.ops import all_ops
from halocline.hal.parity import judge

ATTENTION, DENSE = "float64_attention", "float64_dense"
KERNELS: dict[str, tuple[str, str]] = {
    "attention.output": (f"{ATTENTION}:output_float64", f"{DENSE}:prepare_linear_float64"),
    "attention.plan": (f"{ATTENTION}:plan_float64", ""),
    "attention.prepare_query": (f"{ATTENTION}:prepare_query_float64", ""),
    "attention.sparse_decode": (f"{ATTENTION}:sparse_float64", ""),
    "attention.sparse_prefill": (f"{ATTENTION}:sparse_float64", ""),
    "collective.all_gather": (f"{DENSE}:alone_float64", ""),
    "collective.all_reduce": (f"{DENSE}:alone_float64", ""),
    "collective.all_to_all": (f"{DENSE}:sent_to_oneself_float64", ""),
    "collective.broadcast": (f"{DENSE}:alone_float64", ""),
    "compressor.allocate_state": (f"{ATTENTION}:allocate_state_float64", ""),
    "compressor.insert": (f"{ATTENTION}:insert_float64", ""),
    "gemm.linear": (f"{DENSE}:linear_float64", f"{DENSE}:prepare_linear_float64"),
    "hyper_connection.head": (f"{DENSE}:head_float64", ""),
    "hyper_connection.read": (f"{DENSE}:read_float64", ""),
    "hyper_connection.write": (f"{DENSE}:write_float64", ""),
    "indexer.logits": (f"{ATTENTION}:logits_float64", ""),
    "indexer.prepare_query": (f"{ATTENTION}:prepare_index_query_float64", ""),
    "indexer.select": (f"{ATTENTION}:select_float64", ""),
    "kv_cache.allocate": (f"{ATTENTION}:allocate_float64", ""),
    "kv_cache.insert_window": (f"{ATTENTION}:insert_window_float64", ""),
    "kv_cache.read_rows": (f"{ATTENTION}:read_rows_float64", ""),
    "kv_cache.write_rows": (f"{ATTENTION}:write_rows_float64", ""),
    "moe.experts": (f"{DENSE}:experts_float64", f"{DENSE}:prepare_experts_float64"),
    "moe.route_by_hash": (f"{DENSE}:route_by_hash_float64", ""),
    "moe.route_by_score": (f"{DENSE}:route_by_score_float64", ""),
    "moe.swiglu": (f"{DENSE}:swiglu_float64", ""),
    "norm.rms_norm": (f"{DENSE}:rms_norm_float64", ""),
}
# Draws have oracles of their own, in tests/backends_reference/test_sampling.py.
ELSEWHERE = {"sampling.sample"}


def small_cases() -> Iterator[Any]:
    for op in KERNELS:
        for case in load_cases((MANIFEST,), op):
            if case.size == "small":
                yield pytest.param(case, id=str(case))


def test_every_op_has_a_formula() -> None:
    assert set(KERNELS) | ELSEWHERE == {op.name for op in all_ops()}


@pytest.mark.parametrize("case", list(small_cases()))
def test_the_reference_equals_the_formula(case: Any, bench_with: Callable[..., Workbench], spec_of: Any) -> None:
    bench = bench_with(case.op, *KERNELS[case.op])
    result = judge(bench, spec_of(bench, case.op), case)
    assert result.within, result
