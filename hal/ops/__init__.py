"""The contracts, one module for each family, and `Ops`: the kernels bound for one layer.

Importing this package imports no torch. `ops.attention.sparse_decode(...)` has the type of the contract
`halocline.hal.ops.attention.sparse_decode`; at run time it is the plain function that was bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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


class _Family(SimpleNamespace):
    """The bound kernels of one family, as plain attributes."""


class Ops:
    """The kernels bound for one layer, by family. Frozen: a layer keeps what it was given."""

    if TYPE_CHECKING:
        attention = attention
        collective = collective
        compressor = compressor
        gemm = gemm
        hyper_connection = hyper_connection
        indexer = indexer
        kv_cache = kv_cache
        moe = moe
        norm = norm
        sampling = sampling

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        """Takes functions by `family.op`; a load-time conversion is named `family.prepare_op`."""
        families: dict[str, dict[str, Callable[..., Any]]] = {}
        for name, kernel in kernels.items():
            family, _, short = name.partition(".")
            families.setdefault(family, {})[short] = kernel
        for family, functions in families.items():
            object.__setattr__(self, family, _Family(**functions))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the bound kernels of a layer are frozen; {name} cannot be set")
