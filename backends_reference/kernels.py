"""Every reference kernel by op name, for what needs them without a choice: training, tests and parity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halocline.backends_reference import (
    attention,
    collective,
    compressor,
    gemm,
    hyper_connection,
    indexer,
    kv_cache,
    moe,
    norm,
    plan,
    sampling,
)

__all__ = ["reference_kernels"]


def reference_kernels() -> dict[str, Callable[..., Any]]:
    """Functions by `family.op`; a load-time conversion is named `family.prepare_op`, as `Ops` takes it."""
    return {
        "attention.output": attention.output_reference,
        "attention.plan": plan.plan_reference,
        "attention.prepare_output": gemm.prepare_linear_reference,
        "attention.prepare_query": attention.prepare_query_reference,
        "attention.sparse_decode": attention.sparse_decode_reference,
        "attention.sparse_prefill": attention.sparse_prefill_reference,
        "collective.all_gather": collective.all_gather_reference,
        "collective.all_reduce": collective.all_reduce_reference,
        "collective.all_to_all": collective.all_to_all_reference,
        "collective.broadcast": collective.broadcast_reference,
        "compressor.allocate_state": compressor.allocate_state_reference,
        "compressor.insert": compressor.insert_reference,
        "gemm.linear": gemm.linear_reference,
        "gemm.prepare_linear": gemm.prepare_linear_reference,
        "hyper_connection.head": hyper_connection.head_reference,
        "hyper_connection.read": hyper_connection.read_reference,
        "hyper_connection.write": hyper_connection.write_reference,
        "indexer.logits": indexer.logits_reference,
        "indexer.prepare_query": indexer.prepare_query_reference,
        "indexer.select": indexer.select_reference,
        "kv_cache.allocate": kv_cache.allocate_reference,
        "kv_cache.insert_window": kv_cache.insert_window_reference,
        "kv_cache.read_rows": kv_cache.read_rows_reference,
        "kv_cache.write_rows": kv_cache.write_rows_reference,
        "moe.experts": moe.experts_reference,
        "moe.prepare_experts": moe.prepare_experts_reference,
        "moe.route_by_hash": moe.route_by_hash_reference,
        "moe.route_by_score": moe.route_by_score_reference,
        "moe.swiglu": moe.swiglu_reference,
        "norm.rms_norm": norm.rms_norm_reference,
        "sampling.sample": sampling.sample_reference,
    }
