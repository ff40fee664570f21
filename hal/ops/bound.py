"""`Ops`: the kernels bound for one layer, with the types of their contracts.

`ops.attention.sparse_decode(...)` reads like the op's name and is, at run time, the plain function that was bound. What
was not bound is still the contract, which says so when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from halocline.hal.ops import (
    attention,
    collective,
    compressor,
    gemm,
    hyper_connection,
    indexer,
    kv_cache,
    moe,
    norm,
    sampling,
)

__all__ = ["Ops"]


class _Attention:
    output = attention.output
    plan = attention.plan
    prepare_output = gemm.prepare_linear
    prepare_query = attention.prepare_query
    sparse_decode = attention.sparse_decode
    sparse_prefill = attention.sparse_prefill


class _Collective:
    all_gather = collective.all_gather
    all_reduce = collective.all_reduce
    all_to_all = collective.all_to_all
    broadcast = collective.broadcast


class _Compressor:
    allocate_state = compressor.allocate_state
    insert = compressor.insert


class _Gemm:
    linear = gemm.linear
    prepare_linear = gemm.prepare_linear


class _HyperConnection:
    head = hyper_connection.head
    read = hyper_connection.read
    write = hyper_connection.write


class _Indexer:
    logits = indexer.logits
    prepare_query = indexer.prepare_query
    select = indexer.select


class _KvCache:
    allocate = kv_cache.allocate
    insert_window = kv_cache.insert_window
    read_rows = kv_cache.read_rows
    write_rows = kv_cache.write_rows


class _Moe:
    experts = moe.experts
    prepare_experts = moe.prepare_experts
    route_by_hash = moe.route_by_hash
    route_by_score = moe.route_by_score
    swiglu = moe.swiglu


class _Norm:
    rms_norm = norm.rms_norm


class _Sampling:
    sample = sampling.sample


class Ops:
    """The kernels bound for one layer, by family. Frozen: a layer keeps what it was given."""

    attention: _Attention
    collective: _Collective
    compressor: _Compressor
    gemm: _Gemm
    hyper_connection: _HyperConnection
    indexer: _Indexer
    kv_cache: _KvCache
    moe: _Moe
    norm: _Norm
    sampling: _Sampling

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        """Takes functions by `family.op`; a load-time conversion is named `family.prepare_op`."""
        families = {
            "attention": _Attention(),
            "collective": _Collective(),
            "compressor": _Compressor(),
            "gemm": _Gemm(),
            "hyper_connection": _HyperConnection(),
            "indexer": _Indexer(),
            "kv_cache": _KvCache(),
            "moe": _Moe(),
            "norm": _Norm(),
            "sampling": _Sampling(),
        }
        for name, kernel in kernels.items():
            family, _, short = name.partition(".")
            setattr(families[family], short, kernel)
        self.__dict__.update(families)

    @property
    def kernels(self) -> frozenset[tuple[str, Callable[..., Any]]]:
        """The bound functions by `family.op`: the same for layers with the same kernels."""
        families: dict[str, object] = vars(self)
        return frozenset((f"{name}.{op}", kernel) for name, ops in families.items() for op, kernel in vars(ops).items())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the bound kernels of a layer are frozen; {name} cannot be set")
