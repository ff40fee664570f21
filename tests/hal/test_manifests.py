"""The manifests of this repository: complete, consistent with the contracts, and true about what exists."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from halocline.hal.backend import Manifest, load_manifests, specs_of
from halocline.hal.device import ARCHS
from halocline.hal.errors import ConfigError
from halocline.hal.op import KernelSpec
from halocline.hal.ops import all_ops, find_op
from halocline.hal.providers import choose_provider, provider_problem
from halocline.hal.runtime import load_target
from halocline.hal.stages import rank_on
from halocline.hal.startup import installed_for
from halocline.hal.table import Bound

MANIFESTS = {manifest.name: manifest for manifest in load_manifests()}
SPECS = specs_of(MANIFESTS.values())


def label(spec: KernelSpec) -> str:
    return f"{spec.vendor or 'any'}-{spec.op}-{spec.name}"


def is_planned(spec: KernelSpec) -> bool:
    statuses = {spec.status} if isinstance(spec.status, str) else set(spec.status.values())
    return statuses == {"planned"}


def defined(target: str, root: Path) -> ast.FunctionDef | None:
    """The function of a target, read without importing it."""
    module, _, name = target.partition(":")
    file = root / (module.removeprefix("halocline.").replace(".", "/") + ".py")
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return next((node for node in functions if node.name == name), None)


def test_the_backends_of_this_repository() -> None:
    assert {name: manifest.vendor for name, manifest in MANIFESTS.items()} == {
        "reference": "",
        "cuda": "nvidia",
        "hip": "amd",
    }


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_a_record_fits_its_contract(spec: KernelSpec) -> None:
    op = find_op(spec.op)
    assert op is not None
    assert set(op.semantics) <= set(spec.semantics), "a meaning left out would reject the kernel everywhere"
    assert set(spec.semantics) <= set(op.semantics), "a meaning that the op does not know is a mistyped one"
    assert bool(spec.prepare) is (op.prepare is not None)
    assert set(spec.archs) <= set(ARCHS)
    assert all(ARCHS[arch].vendor == spec.vendor for arch in spec.archs)
    assert "compute" in spec.formats
    assert all(bad.reason and "#" in bad.source for bad in spec.known_bad)
    assert spec.graph_safe or not op.graph_safe


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_the_status_is_true(spec: KernelSpec, root: Path) -> None:
    """What is not planned exists; what exists is not planned."""
    exists = defined(spec.target, root) is not None
    assert exists is not is_planned(spec), f"{spec.target} exists: {exists}, status: {spec.status}"
    if spec.prepare and exists:
        assert defined(spec.prepare, root) is not None


@pytest.mark.parametrize("op", sorted(op.name for op in all_ops()))
def test_every_op_has_a_reference_and_a_kernel_on_each_vendor(op: str) -> None:
    names = {(spec.vendor, spec.name) for spec in SPECS if spec.op == op}
    assert ("", "reference") in names
    assert {vendor for vendor, _ in names} == {"", "nvidia", "amd"}


def kernels_on(arch: str) -> Iterator[tuple[str, str, int]]:
    vendor = ARCHS[arch].vendor
    for spec in SPECS:
        if spec.vendor in ("", vendor) and (not spec.archs or arch in spec.archs):
            yield spec.op, spec.name, rank_on(spec, arch)


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_no_two_kernels_of_an_op_have_one_rank_on_a_device(arch: str) -> None:
    counts = Counter((op, rank) for op, _, rank in kernels_on(arch))
    assert [key for key, count in counts.items() if count > 1] == []


def test_the_matrix_of_libraries_is_there() -> None:
    """The rows of the design: need, vendor, libraries."""
    rows = {(spec.vendor, spec.op): set() for spec in SPECS}
    for spec in SPECS:
        rows[spec.vendor, spec.op].add(spec.name)
    expected = {
        ("nvidia", "attention.sparse_decode"): {"flashmla", "flashinfer_trtllm", "triton", "tilelang"},
        ("nvidia", "attention.sparse_prefill"): {"flashmla", "triton", "tilelang"},
        ("nvidia", "indexer.logits"): {"deep_gemm", "triton", "tilelang"},
        ("nvidia", "indexer.select"): {"flashinfer", "triton"},
        ("nvidia", "hyper_connection.read"): {"flashinfer", "triton", "tilelang"},
        ("nvidia", "gemm.linear"): {"deep_gemm", "triton", "tilelang"},
        ("nvidia", "moe.experts"): {
            "triton_kernels", "humming", "deep_gemm", "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_trtllm",
            "marlin", "triton",
        },
        ("amd", "attention.sparse_decode"): {"triton", "tilelang", "aiter"},
        ("amd", "attention.sparse_prefill"): {"triton", "tilelang", "aiter", "tokenspeed"},
        ("amd", "indexer.logits"): {"triton", "tilelang", "aiter"},
        ("amd", "hyper_connection.read"): {"triton", "aiter", "tilelang"},
        ("amd", "gemm.linear"): {"triton", "tilelang", "aiter"},
        ("amd", "moe.experts"): {"triton", "aiter"},
    }  # fmt: skip
    assert {key: rows[key] for key in expected} == expected


def test_flashmla_has_three_homes() -> None:
    (spec,) = (s for s in SPECS if (s.op, s.name) == ("attention.sparse_decode", "flashmla"))
    assert [(p.distribution, p.module) for p in spec.providers] == [
        ("sglang-kernel", "sgl_kernel"),
        ("sgl-flash-mla", "flash_mla"),
        ("tokenspeed-flashmla", "flash_mla"),
    ]


INSTALLED = installed_for(SPECS)


def is_loadable(spec: KernelSpec) -> bool:
    """Whether a kernel is written and its libraries are installed here."""
    here = not spec.providers or choose_provider(spec.providers, INSTALLED)[0] is not None
    return not is_planned(spec) and here and not any(provider_problem(p, INSTALLED) for p in spec.requires)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if is_loadable(spec)], ids=label)
def test_a_loaded_kernel_has_the_signature_of_its_contract(spec: KernelSpec) -> None:
    """Names, kinds and defaults; the types are the business of the type checkers."""
    op = find_op(spec.op)
    assert op is not None
    bound = Bound(spec=spec, provider=None, version="", status="run")
    pairs = [(op, spec.target), *([(op.prepare, spec.prepare)] if op.prepare is not None else [])]
    for contract, target in pairs:
        kernel = load_target(target, bound)
        expected = [(p.name, p.kind, p.default) for p in contract.signature.parameters.values()]
        assert [(p.name, p.kind, p.default) for p in inspect.signature(kernel).parameters.values()] == expected
        assert kernel.__halocline_op__ == contract.name


# ---- mistakes in manifests --------------------------------------------------------------------------------------


def manifest(name: str, vendor: str, *specs: KernelSpec) -> Manifest:
    return Manifest(name=name, vendor=vendor, specs=specs)


def spec(name: str, vendor: str = "") -> KernelSpec:
    return KernelSpec(op="norm.rms_norm", name=name, target="a.b:c", vendor=vendor)


@pytest.mark.parametrize(
    ("first", "second", "clash"),
    [("", "", True), ("nvidia", "nvidia", True), ("", "amd", True), ("nvidia", "amd", False)],
)
def test_two_kernels_of_one_name_that_can_meet_are_an_error(first: str, second: str, clash: bool) -> None:
    both = [manifest("one", "", spec("x", first)), manifest("two", "", spec("x", second))]
    if not clash:
        assert len(specs_of(both)) == 2
        return
    with pytest.raises(ConfigError, match=r"two kernels are called norm\.rms_norm=x"):
        specs_of(both)


def test_a_kernel_of_another_vendor_does_not_belong_in_a_manifest() -> None:
    with pytest.raises(ConfigError, match="is of vendor 'amd', not 'nvidia'"):
        manifest("cuda", "nvidia", spec("x", "amd"))
