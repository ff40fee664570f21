"""Tables of docs/amd.md: which kernel was proven by which rung, read from the reports of tests and from the manifests.

Reports: `tests/kernels_portable/isa_report.json` (compiled), `tests/backends_hip/tilelang_report.json` (lowered,
emulated, compiled). A portable kernel counts as interpreted when a test of `tests/kernels_portable` imports it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halocline.hal.backend import load_manifests, specs_of
from halocline.hal.op import KernelSpec
from halocline.hal.stages import status_on

__all__ = ["OP_KERNELS", "amd_tables"]

ROOT = Path(__file__).resolve().parent.parent
ISA = ROOT / "tests" / "kernels_portable" / "isa_report.json"
TILELANG = ROOT / "tests" / "backends_hip" / "tilelang_report.json"
ARCHS = ("gfx942", "gfx950")

_PRODUCTS = ("quantize_activation", "fp8_gemm", "thin_fp8_gemm", "dense_gemm", "thin_gemm", "grouped_gemm_fp4")
_EXPERTS = ("align_experts", "grouped_gemm_fp4", "grouped_gemm_fp8", "grouped_gemm_plain", "swiglu", "sum_experts")
# Kernels that serve an op on an AMD device; ops that are torch alone have none.
OP_KERNELS: dict[str, tuple[str, ...]] = {
    "attention.output": ("rotate_back", "fp8_gemm", "thin_fp8_gemm", "dense_gemm"),
    "attention.plan": ("plan_window", "plan_blocks"),
    "attention.prepare_query": ("query_norm_rope",),
    "attention.sparse_decode": ("sparse_attention", "combine_splits"),
    "attention.sparse_prefill": ("sparse_attention",),
    "collective.all_gather": (),
    "collective.all_reduce": (),
    "collective.all_to_all": (),
    "collective.broadcast": (),
    "compressor.allocate_state": (),
    "compressor.insert": ("insert_entries",),
    "gemm.linear": _PRODUCTS,
    "hyper_connection.head": ("mix_streams", "collapse_streams"),
    "hyper_connection.read": ("mix_streams", "read_streams"),
    "hyper_connection.write": ("write_streams",),
    "indexer.logits": ("index_logits",),
    "indexer.prepare_query": ("index_query",),
    "indexer.select": ("select_entries", "shortlist"),
    "kv_cache.allocate": (),
    "kv_cache.insert_window": ("insert_window",),
    "kv_cache.read_rows": ("read_rows",),
    "kv_cache.write_rows": ("write_rows",),
    "moe.experts": ("quantize_activation", *_EXPERTS),
    "moe.route_by_hash": ("route_by_hash",),
    "moe.route_by_score": ("route_by_score",),
    "moe.swiglu": ("swiglu",),
    "norm.rms_norm": ("rms_norm",),
    "sampling.sample": ("sampling_thresholds", "draw_parts", "pick_tokens"),
}
_TILELANG_OPS = {
    "sparse_attention": "attention.sparse_decode, attention.sparse_prefill",
    "combine_splits": "attention.sparse_decode",
    "index_logits": "indexer.logits",
    "fp8_gemm": "gemm.linear",
    "mix_streams": "hyper_connection.read",
    "stream_coefficients": "hyper_connection.read",
    "site_input": "hyper_connection.read",
    "write_streams": "hyper_connection.write",
}


def amd_tables() -> str:
    """The tables, in Markdown."""
    specs = specs_of(load_manifests())
    parts = ["### Portable Triton kernels", "", *_portable(specs), "", "### tilelang kernels", "", *_tilelang(specs)]
    return "\n".join([*parts, "", "### Calls into AMD's libraries", "", *_libraries(specs)])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    lines = [f"| {' | '.join(names)} |", f"| --- |{' --- |' * (len(names) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _on_nvidia(specs: Iterable[KernelSpec], op: str, name: str) -> str:
    found = [spec for spec in specs if (spec.vendor, spec.op, spec.name) == ("nvidia", op, name)]
    return "run" if any(status_on(spec, "sm_90") == "run" for spec in found) else "not run"


# ---- portable kernels -----------------------------------------------------------------------------------------------


def _imports(path: Path) -> set[str]:
    """Modules of `kernels_portable` that a file imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    found = {name for node in nodes for name in re.findall(r"^halocline\.kernels_portable\.(\w+)", node.module or "")}
    return found | {a.name for node in nodes if node.module == "halocline.kernels_portable" for a in node.names}


def _interpreted_kernels() -> set[str]:
    """Kernels whose module some interpreter test reaches."""
    folder = ROOT / "kernels_portable"
    tests = [path for path in (ROOT / "tests" / "kernels_portable").glob("test_*.py") if path.name != "test_aot.py"]
    reached: set[str] = set()
    waiting = set().union(*(_imports(path) for path in tests))
    while waiting:
        module = waiting.pop()
        reached.add(module)
        path = folder / f"{module}.py"
        waiting |= (_imports(path) if path.exists() else set()) - reached
    return {
        name
        for module in reached
        if (folder / f"{module}.py").exists()
        for name in re.findall(r"^def _(\w+)_kernel\(", (folder / f"{module}.py").read_text(), re.MULTILINE)
    }


def _portable(specs: Iterable[KernelSpec]) -> list[str]:
    rows: list[dict[str, Any]] = json.loads(ISA.read_text())
    interpreted = _interpreted_kernels()
    table = []
    for op, kernels in OP_KERNELS.items():
        if not kernels:
            run = "run" if "run" in {_on_nvidia(specs, op, name) for name in ("torch", "nccl")} else "not run"
            table.append([f"`{op}`", "torch alone", "-", *("-" for _ in ARCHS), run, "not run"])
            continue
        counts = [sum(row["arch"] == arch and row["kernel"] in kernels for row in rows) for arch in ARCHS]
        table.append(
            [
                f"`{op}`",
                ", ".join(kernels),
                "interpreted" if interpreted.issuperset(kernels) else "not run",
                *(f"compiled ({count})" for count in counts),
                _on_nvidia(specs, op, "triton"),
                "not run",
            ]
        )
    return _table(("op", "kernels", "CPU", *ARCHS, "NVIDIA (sm_90)", "AMD hardware"), table)


# ---- tilelang and libraries -----------------------------------------------------------------------------------------


def _tilelang(specs: Iterable[KernelSpec]) -> list[str]:
    report = json.loads(TILELANG.read_text())
    table = []
    for program, ops in _TILELANG_OPS.items():
        rows = [row for row in report["lowered"] if row["kernel"].partition("-")[0] == program]
        checked = {row["arch"] for row in report["emulated"] if row["check"].startswith(program)}
        if program == "combine_splits":  # checked behind divided attention
            checked = {row["arch"] for row in report["emulated"] if "splits=3" in row["check"]}
        compiled = sorted({row["arch"] for row in rows if "machine_code" in row})
        table.append(
            [
                f"`{program}`",
                ops,
                ", ".join(sorted({row["arch"] for row in rows})),
                ", ".join(sorted(checked)),
                ", ".join(compiled) or "-",
                _on_nvidia(specs, ops.partition(",")[0], "tilelang"),
                "not run",
            ]
        )
    head = ("program", "ops", "lowered", "emulated from source", "compiled", "NVIDIA (sm_90)", "AMD hardware")
    return _table(head, table)


def _libraries(specs: Iterable[KernelSpec]) -> list[str]:
    rows = [spec for spec in specs if spec.vendor == "amd" and spec.name in ("aiter", "tokenspeed")]
    table = [
        [f"`{spec.op}`", spec.name, ", ".join(spec.archs), "signature and stand-in", "not run"]
        for spec in sorted(rows, key=lambda spec: (spec.op, spec.name))
    ]
    return _table(("op", "library", "devices", "checked by", "AMD hardware"), table)
