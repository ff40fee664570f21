"""The kernels of `tests/parity/float64_*.py` as one table: the same network on formulas of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from halocline.hal.ops import Ops

HERE = Path(__file__).resolve().parent
for place in (HERE, HERE.parent / "parity"):
    if str(place) not in sys.path:  # importlib mode leaves test folders out
        sys.path.insert(0, str(place))


@pytest.fixture(scope="session")
def float64_ops() -> Ops:
    """Every op that a network calls, one token at a time in float64."""
    import float64_attention as attention
    import float64_dense as dense

    return Ops(
        {
            "attention.output": attention.output_float64,
            "attention.plan": attention.plan_float64,
            "attention.prepare_output": dense.prepare_linear_float64,
            "attention.prepare_query": attention.prepare_query_float64,
            "attention.sparse_decode": attention.sparse_float64,
            "attention.sparse_prefill": attention.sparse_float64,
            "collective.all_gather": dense.alone_float64,
            "collective.all_reduce": dense.alone_float64,
            "compressor.allocate_state": attention.allocate_state_float64,
            "compressor.insert": attention.insert_float64,
            "gemm.linear": dense.linear_float64,
            "gemm.prepare_linear": dense.prepare_linear_float64,
            "hyper_connection.head": dense.head_float64,
            "hyper_connection.read": dense.read_float64,
            "hyper_connection.write": dense.write_float64,
            "indexer.logits": attention.logits_float64,
            "indexer.prepare_query": attention.prepare_index_query_float64,
            "indexer.select": attention.select_float64,
            "kv_cache.allocate": attention.allocate_float64,
            "kv_cache.insert_window": attention.insert_window_float64,
            "kv_cache.read_rows": attention.read_rows_float64,
            "kv_cache.write_rows": attention.write_rows_float64,
            "moe.experts": dense.experts_float64,
            "moe.prepare_experts": dense.prepare_experts_float64,
            "moe.route_by_hash": dense.route_by_hash_float64,
            "moe.route_by_score": dense.route_by_score_float64,
            "moe.swiglu": dense.swiglu_float64,
            "norm.rms_norm": dense.rms_norm_float64,
        }
    )
