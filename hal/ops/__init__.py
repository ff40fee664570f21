"""The contracts, one module for each family, and `Ops`: the kernels bound for one layer. No torch is imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halocline.hal.op import Op
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
from halocline.hal.ops.bound import Ops

__all__ = ["FAMILIES", "Ops", "all_ops", "find_op"]

FAMILIES = (
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


def all_ops() -> Iterator[Op[..., Any]]:
    """Every op that a kernel is chosen for; load-time conversions come with the op that they prepare."""
    prepares = {id(found.prepare) for found in _declared() if found.prepare is not None}
    yield from (found for found in _declared() if id(found) not in prepares)


def find_op(name: str) -> Op[..., Any] | None:
    """The op of this name, or None."""
    return next((found for found in all_ops() if found.name == name), None)


def _declared() -> Iterator[Op[..., Any]]:
    for module in FAMILIES:
        family = module.__name__.rpartition(".")[2]
        yield from (v for v in vars(module).values() if isinstance(v, Op) and v.family == family)
