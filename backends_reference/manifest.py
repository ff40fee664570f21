"""The reference backend: every contract in plain torch. On a CPU it serves; on a GPU it is chosen by name only."""

from __future__ import annotations

from halocline.hal.backend import Manifest
from halocline.hal.op import KernelSpec

__all__ = ["MANIFEST"]

_HOME = "halocline.backends_reference"
_COMPUTE = ("float32", "bfloat16")
_WEIGHTS = ("float32", "bfloat16", "fp8_block", "mxfp4", "nvfp4")

# It is the definition of every meaning, so it honours them all.
_SEMANTICS = {
    "activation": ("none", "fp8_group128"),
    "cache_format": ("float32", "bfloat16", "fp8_block64", "fp8_row", "fp4_group32"),
    "fp8_dialect": ("none", "ocp", "fnuz"),
    "index_query": ("none", "fp4_group32", "fp8_row"),
    "rope_pairing": ("adjacent",),
    "scoring": ("sqrtsoftplus",),
    "sink": ("denominator",),
    "swiglu_clamp": ("gate_above_up_both",),
    "weight_before_down": ("yes",),
}

_CACHE = "cache_format fp8_dialect"

# Their products come from a library that rounds differently with the number of rows; the rest works row by row.
_BY_BATCH = (
    "attention.output",
    "attention.sparse_decode",
    "attention.sparse_prefill",
    "gemm.linear",
    "hyper_connection.head",
    "hyper_connection.read",
    "indexer.logits",
    "moe.experts",
)


def _reference(
    op: str, semantics: str = "", *, home: str = "", prepare: str = "", graph_safe: bool = True
) -> KernelSpec:
    """One row: the function `<op>_reference` in the file of its family."""
    family, _, short = op.partition(".")
    module = f"{_HOME}.{home or family}"
    return KernelSpec(
        op=op,
        name="reference",
        target=f"{module}:{short}_reference",
        prepare=f"{_HOME}.{prepare}" if prepare else "",
        formats={"compute": _COMPUTE, "weight": _WEIGHTS},
        semantics={name: _SEMANTICS[name] for name in semantics.split()},
        graph_safe=graph_safe,
        deterministic="run" if op in _BY_BATCH else "batch",
        rank=0,
        status={"cpu": "run"},
    )


_GEMM = "gemm:prepare_linear_reference"

MANIFEST = Manifest(
    name="reference",
    vendor="",
    cases=f"{_HOME}.cases_{{family}}:cases",
    specs=(
        _reference("attention.plan", home="plan"),
        _reference("attention.prepare_query", "rope_pairing"),
        _reference("attention.sparse_decode", f"sink {_CACHE}"),
        _reference("attention.sparse_prefill", f"sink {_CACHE}"),
        _reference("attention.output", "rope_pairing fp8_dialect", prepare=_GEMM),
        _reference("collective.all_gather"),
        _reference("collective.all_reduce"),
        _reference("collective.all_to_all", graph_safe=False),
        _reference("collective.broadcast"),
        _reference("compressor.allocate_state"),
        _reference("compressor.insert", f"{_CACHE} rope_pairing"),
        _reference("gemm.linear", "fp8_dialect activation", prepare=_GEMM),
        _reference("hyper_connection.head"),
        _reference("hyper_connection.read"),
        _reference("hyper_connection.write"),
        _reference("indexer.logits", _CACHE),
        _reference("indexer.prepare_query", "rope_pairing index_query fp8_dialect"),
        _reference("indexer.select"),
        _reference("kv_cache.allocate"),
        _reference("kv_cache.insert_window", f"{_CACHE} rope_pairing"),
        _reference("kv_cache.read_rows", _CACHE),
        _reference("kv_cache.write_rows", _CACHE),
        _reference(
            "moe.experts",
            "fp8_dialect activation swiglu_clamp weight_before_down",
            prepare="moe:prepare_experts_reference",
        ),
        _reference("moe.route_by_hash", "scoring"),
        _reference("moe.route_by_score", "scoring"),
        _reference("moe.swiglu", "swiglu_clamp"),
        _reference("norm.rms_norm"),
        _reference("sampling.sample"),
    ),
)
