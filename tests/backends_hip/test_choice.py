"""What is bound on AMD devices, with and without each library, and by every value of HALOCLINE_HIP_BACKEND."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from halocline.hal.backend import load_manifests, specs_of
from halocline.hal.errors import NoKernelError
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec
from halocline.hal.ops import all_ops
from halocline.hal.overrides import collect_overrides
from halocline.hal.profiles import PROFILES
from halocline.hal.selection import resolve
from halocline.hal.settings import Settings
from halocline.hal.stages import Policy
from halocline.hal.table import KernelTable
from halocline.models.deepseek_v4.presets import preset
from halocline.models.explain import describe_model

ARCHS = ("gfx942", "gfx950")
SPECS = specs_of(load_manifests())
ALWAYS = (("triton", "3.6.0", "triton"),)
OPTIONAL = (
    ("tilelang", "0.1.15", "tilelang"),
    ("amd-aiter", "0.1.9", "aiter"),
    ("tokenspeed-kernel-amd", "0.1.4", "tokenspeed_kernel_amd"),
)
SUBSETS = [rows for count in range(4) for rows in itertools.combinations(OPTIONAL, count)]


def inventory_of(packages: Any) -> Inventory:
    rows = (*ALWAYS, *packages)
    return Inventory.of(Package(distribution=name, version=v, modules=(module,)) for name, v, module in rows)


def table(arch: str, packages: Any = OPTIONAL, backend: str = "auto", model: str = "flash") -> KernelTable:
    """The table of a model on a recorded device. Nothing planned may be bound."""
    device = PROFILES[arch].device
    overrides, _ = collect_overrides(settings=Settings(hip_backend=backend), device=device)
    return resolve(
        describe_model(preset(model))(device, "ragged"),
        specs=SPECS,
        device=device,
        inventory=inventory_of(packages),
        policy=Policy(overrides=overrides),
    )


def chosen(found: KernelTable) -> dict[str, str | None]:
    return {binding.op: binding.chosen for binding in found.bindings}


# Portable Triton serves what it can: it is the only kind of kernel that was interpreted, compiled and run at all.
# Rows are sent to their experts only where that was asked for.
ONLY_WHEN_SENT = "collective.all_to_all"
EXPECTED = {op.name: "triton" for op in all_ops() if op.name != ONLY_WHEN_SENT} | {
    "kv_cache.allocate": "torch",
    "compressor.allocate_state": "torch",
    "collective.all_gather": "rccl",
    "collective.all_reduce": "rccl",
    "collective.broadcast": "rccl",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("packages", SUBSETS, ids=lambda rows: "+".join(row[0] for row in rows) or "triton alone")
def test_every_op_is_bound_whatever_is_installed(arch: str, model: str, packages: Any) -> None:
    """No dead end where a library is missing though a fallback exists (vllm-project/vllm#51530)."""
    assert chosen(table(arch, packages, model=model)) == EXPECTED


def is_refused(arch: str, spec: KernelSpec) -> bool:
    """Whether asking for a kernel by name stops the start; otherwise it is bound."""
    device = PROFILES[arch].device
    overrides, _ = collect_overrides(flags=[f"{spec.op}={spec.name}"], device=device)
    try:
        found = resolve(
            describe_model(preset("flash"))(device, "ragged"),
            specs=SPECS,
            device=device,
            inventory=inventory_of(OPTIONAL),
            policy=Policy(overrides=overrides),
        )
    except NoKernelError:
        return True
    assert chosen(found)[spec.op] == spec.name
    return False


NEVER = {("moe.experts", "aiter")}  # it weighs after the down product, and takes no MXFP4
ON_GFX942 = {
    ("attention.sparse_decode", "aiter"), ("indexer.logits", "aiter"),
    ("hyper_connection.read", "tilelang"), ("hyper_connection.write", "tilelang"),
}  # fmt: skip


@pytest.mark.parametrize(("arch", "refused"), [("gfx942", NEVER | ON_GFX942), ("gfx950", NEVER)], ids=ARCHS)
def test_by_name_a_kernel_is_bound_unless_it_is_known_to_be_wrong(arch: str, refused: set[tuple[str, str]]) -> None:
    written = [s for s in SPECS if s.vendor == "amd" and arch in s.archs and s.op != ONLY_WHEN_SENT]
    assert {(spec.op, spec.name) for spec in written if is_refused(arch, spec)} == refused


SPARSE = ("attention.sparse_decode", "attention.sparse_prefill")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("backend", "sparse", "others"),
    [
        ("auto", "triton", "triton"),
        ("triton", "triton", "triton"),
        ("tilelang", "tilelang", "triton"),
        ("reference", "reference", "reference"),
        ("comparison", "compare(triton,reference)", "compare(triton,reference)"),
    ],
)
def test_the_entry_point_chooses_the_attention_ops(arch: str, backend: str, sparse: str, others: str) -> None:
    """One variable for all attention ops that have such a kernel; the rest keep their choice."""
    found = chosen(table(arch, backend=backend))
    assert {op: found[op] for op in SPARSE} == dict.fromkeys(SPARSE, sparse)
    assert {found[op] for op in found if op.startswith("attention.") and op not in SPARSE} == {others}
    outside = {op: kernel for op, kernel in found.items() if not op.startswith("attention.")}
    assert outside == {op: kernel for op, kernel in EXPECTED.items() if op in outside}


def test_the_entry_point_takes_aiter_where_it_is_not_known_to_be_wrong() -> None:
    found = chosen(table("gfx950", backend="aiter"))
    assert {op: found[op] for op in SPARSE} == dict.fromkeys(SPARSE, "aiter")


def test_the_entry_point_refuses_aiter_where_it_is_known_to_be_wrong() -> None:
    """Mixed dialects (vllm-project/vllm#45681) and long contexts (sgl-project/sglang#36390), on gfx942."""
    with pytest.raises(NoKernelError) as caught:
        table("gfx942", backend="aiter")
    text = str(caught.value)
    assert "HALOCLINE_HIP_BACKEND=aiter" in text
    assert "vllm-project/vllm#45681" in text
    assert "sgl-project/sglang#36390" in text


@pytest.mark.parametrize("backend", ["tilelang", "aiter"])
def test_the_entry_point_never_falls_back(backend: str) -> None:
    with pytest.raises(NoKernelError, match="is not installed"):
        table("gfx950", packages=(), backend=backend)


def test_comparison_runs_two_named_kernels() -> None:
    found = table("gfx950", backend="comparison")
    decode = next(binding for binding in found.bindings if binding.op == SPARSE[0])
    assert [bound.spec.name for bound in decode.kernels] == ["triton", "reference"]


def test_no_kernel_for_amd_is_planned_or_claims_to_have_run() -> None:
    """Everything is written; nothing was ever executed on AMD hardware."""
    statuses = {(spec.op, spec.name): spec.status for spec in SPECS if spec.vendor == "amd"}
    assert set(statuses.values()) == {"not_run"}
