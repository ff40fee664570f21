"""Every contract is complete: specification, tolerance, meanings, a reference of the same signature, and inputs.

`faults_of` finds what is missing. The second half of this file removes each thing from a sound contract and checks that
its absence is found.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from halocline.backends_reference.kernels import reference_kernels
from halocline.backends_reference.manifest import MANIFEST
from halocline.hal.offline import load_cases
from halocline.hal.op import Op, Tolerance, op
from halocline.hal.ops import all_ops
from halocline.hal.ops.norm import rms_norm
from halocline.hal.runtime import prepare_name

OPS = {found.name: found for found in all_ops()}
PREPARES = {prepare_name(found.name): found.prepare for found in OPS.values() if found.prepare is not None}
KERNELS = reference_kernels()

# Sections that a contract may leave out, and why.
WITHOUT_SOURCE = {
    "attention.plan": "bookkeeping of our own",
    "collective.all_gather": "an exchange",
    "collective.all_reduce": "an exchange",
    "collective.all_to_all": "an exchange",
    "collective.broadcast": "an exchange",
    "compressor.allocate_state": "memory",
    "gemm.prepare_linear": "a conversion that belongs to the kernel",
    "kv_cache.allocate": "memory",
    "moe.prepare_experts": "a conversion that belongs to the kernel",
}
# Ops without a tolerance, and why: what they give is compared exactly.
EXACT = {
    "attention.plan": "whole numbers",
    "collective.all_to_all": "rows that were moved",
    "collective.broadcast": "rows that were moved",
    "compressor.allocate_state": "sizes",
    "indexer.select": "a set of slots",
    "kv_cache.allocate": "zeros",
    "sampling.sample": "token ids",
}
# A parameter of this name makes a numeric meaning part of the request.
MEANINGS = {
    "rope": {"rope_pairing"},
    "sink_H": {"sink"},
    "cache": {"cache_format", "fp8_dialect"},
    "window_cache": {"cache_format", "fp8_dialect"},
    "limit": {"swiglu_clamp"},
    "rounding": {"index_query", "fp8_dialect"},
    "num_chosen": {"scoring"},
    "table_VK": {"scoring"},
    "weights": {"activation", "fp8_dialect"},
}
# No zero-token input: the op takes none.
NEVER_EMPTY = {"compressor.allocate_state", "kv_cache.allocate"}
# Row formats that an op never meets: index keys in attention and in the window, latents in the indexer.
KEY_FORMATS, LATENT_FORMATS = {"fp8_row", "fp4_group32"}, {"fp8_block64"}
NEVER_MET = {
    "attention.sparse_decode": KEY_FORMATS,
    "attention.sparse_prefill": KEY_FORMATS,
    "kv_cache.insert_window": KEY_FORMATS,
    "indexer.logits": LATENT_FORMATS,
}


def faults_of(contract: Op[..., Any], kernel: Callable[..., Any] | None, cases: Sequence[Any] | None) -> list[str]:
    """What is missing of an op; `cases` is None for a load-time conversion, which has none of its own."""
    found = [*_docstring(contract), *_body(contract), *_meanings(contract)]
    found += ["no reference kernel"] if kernel is None else _signature(contract, kernel)
    if cases is not None:
        found += [*_tolerances(contract, cases), *_inputs(contract, cases)]
    return found


def _docstring(contract: Op[..., Any]) -> Iterator[str]:
    text = inspect.cleandoc(contract.__doc__ or "")
    summary = text.partition("\n")[0]
    if not summary.endswith("."):
        yield "no summary"
    signature = inspect.signature(contract.contract)
    sections = {name: body for name, body in re.findall(r"^(\w+):(.*(?:\n(?:  .*)?)*)", text, re.MULTILINE)}
    wanted = ["Raises", "Numerics", *(["Args"] if signature.parameters else [])]
    wanted += ["Returns"] if signature.return_annotation != "None" else []
    wanted += ["Source"] if contract.name not in WITHOUT_SOURCE else []
    yield from (f"no section {name}" for name in wanted if not sections.get(name, "").strip())
    documented = re.findall(r"^    (\w+):", sections.get("Args", ""), re.MULTILINE)
    yield from (f"{name} is not described" for name in signature.parameters if name not in documented)
    yield from (f"{name} is described and not there" for name in documented if name not in signature.parameters)


def _body(contract: Op[..., Any]) -> Iterator[str]:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(contract.contract))).body
    assert isinstance(function, ast.FunctionDef)
    statements = [ast.unparse(statement) for statement in function.body[ast.get_docstring(function) is not None :]]
    if statements != ["raise NotImplementedError"]:
        yield "the contract has a body"


def _meanings(contract: Op[..., Any]) -> Iterator[str]:
    parameters = inspect.signature(contract.contract).parameters
    for parameter, meanings in MEANINGS.items():
        if parameter in parameters:
            yield from (f"{parameter} without {m}" for m in sorted(meanings - set(contract.semantics)))
    yield from (f"mutates {name}, which is no parameter" for name in contract.mutates if name not in parameters)


def _signature(contract: Op[..., Any], kernel: Callable[..., Any]) -> Iterator[str]:
    def shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    if shape(contract.contract) != shape(kernel):
        yield "the reference has another signature"
    if getattr(kernel, "__halocline_op__", None) != contract.name:
        yield "the reference does not say what it implements"


def _tolerances(contract: Op[..., Any], cases: Sequence[Any]) -> Iterator[str]:
    if contract.name in EXACT:
        if contract.tolerances:
            yield "a tolerance for what is compared exactly"
        return
    for dtype in sorted({case.dtype for case in cases}):
        if dtype not in contract.tolerances:
            yield f"no tolerance for {dtype}"
    for dtype, tolerance in contract.tolerances.items():
        if min(tolerance.atol, tolerance.rtol, tolerance.norm) < 0 or not tolerance.reason:
            yield f"the tolerance for {dtype} is no tolerance"


def _inputs(contract: Op[..., Any], cases: Sequence[Any]) -> Iterator[str]:
    if len({str(case) for case in cases}) < len(cases):
        yield "two inputs of one name"
    if not cases:
        yield "no inputs"
        return
    if contract.name not in NEVER_EMPTY and not any("empty" in case.name or "0_rows" in case.name for case in cases):
        yield "no empty input"
    (spec,) = (spec for spec in MANIFEST.specs if spec.op == contract.name)
    for name, values in spec.semantics.items():
        asked = {getattr(case, "semantics", {}).get(name) for case in cases}
        excused = NEVER_MET.get(contract.name, set())
        yield from (f"no input with {name}={v}" for v in values if v not in asked | excused)
    if spec.prepare and contract.name != "attention.output":
        weights = {case.formats.get("weight") for case in cases}
        yield from (f"no input with a weight in {v}" for v in spec.formats["weight"] if v not in weights)


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_is_complete(name: str) -> None:
    assert faults_of(OPS[name], KERNELS.get(name), load_cases((MANIFEST,), name)) == []


@pytest.mark.parametrize("name", sorted(PREPARES))
def test_a_load_time_conversion_is_complete(name: str) -> None:
    assert faults_of(PREPARES[name], KERNELS.get(name), None) == []


def test_there_is_no_kernel_without_a_contract() -> None:
    assert set(KERNELS) == set(OPS) | set(PREPARES)


def test_every_exception_is_needed() -> None:
    names = set(OPS) | {contract.name for contract in PREPARES.values()}
    assert set(WITHOUT_SOURCE) | set(EXACT) | NEVER_EMPTY <= names
    assert {name for name, found in OPS.items() if not found.tolerances} == set(EXACT)


# ---- each thing removed from a sound contract ------------------------------------------------------------------

SOUND = """Divides each row by its root mean square and multiplies by a gain.

    Args:
        x_TD: Rows.
        weight_D: Gain.
        eps: Added to the mean square.

    Returns:
        Rows.

    Raises:
        ShapeError: If the gain has another width.
    Numerics: float32.
    Source: A paper.
    """
TOLERANCES = {dtype: Tolerance(atol=0.1, rtol=0.1, norm=0.1, reason="measured") for dtype in ("float32", "bfloat16")}
CASES = load_cases((MANIFEST,), "norm.rms_norm")


def declared(text: str = SOUND, tolerances: Mapping[str, Tolerance] | None = None, **facts: Any) -> Op[..., Any]:
    """A contract like that of the norm with another docstring or other facts."""

    def rms_norm(x_TD: Any, weight_D: Any, *, eps: float) -> Any:
        raise NotImplementedError

    rms_norm.__doc__ = text
    return op("norm", tolerances=TOLERANCES if tolerances is None else tolerances, **facts)(rms_norm)


def faults(contract: Op[..., Any], kernel: Any = KERNELS["norm.rms_norm"], cases: Any = CASES) -> list[str]:
    return faults_of(contract, kernel, cases)


def test_the_sound_contract_has_no_fault() -> None:
    assert faults(declared()) == []
    assert faults(rms_norm) == []


@pytest.mark.parametrize("section", ["Returns", "Raises", "Numerics", "Source"])
def test_a_missing_section_is_found(section: str) -> None:
    lines = SOUND.splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith(f"{section}:"))
    stop = start + (1 if section in ("Numerics", "Source") else 2)
    assert faults(declared("\n".join(lines[:start] + lines[stop:]))) == [f"no section {section}"]


def test_arguments_that_do_not_fit_are_found() -> None:
    assert faults(declared(SOUND.replace("        weight_D: Gain.\n", ""))) == ["weight_D is not described"]
    renamed = faults(declared(SOUND.replace("weight_D: Gain", "gain_D: Gain")))
    assert renamed == ["weight_D is not described", "gain_D is described and not there"]
    assert "no summary" in faults(declared(""))


def test_a_contract_with_a_body_is_found() -> None:
    def rms_norm(x_TD: Any, weight_D: Any, *, eps: float) -> Any:
        return x_TD * weight_D * eps

    rms_norm.__doc__ = SOUND
    assert faults(op("norm", tolerances=TOLERANCES)(rms_norm)) == ["the contract has a body"]


def test_meanings_and_written_parameters_are_checked() -> None:
    assert faults(declared(mutates=("cache",))) == ["mutates cache, which is no parameter"]
    rotating = OPS["attention.prepare_query"]
    silent = op("attention", tolerances=rotating.tolerances)(rotating.contract)
    found = faults_of(silent, KERNELS[silent.name], load_cases((MANIFEST,), silent.name))
    assert found == ["rope without rope_pairing"]


def test_a_missing_or_drifted_reference_is_found() -> None:
    def other_default(x_TD: Any, weight_D: Any, *, eps: float = 1e-6) -> Any:
        return None

    def other_kind(x_TD: Any, weight_D: Any, eps: float) -> Any:
        return None

    for kernel in (other_default, other_kind):
        kernel.__halocline_op__ = "norm.rms_norm"  # type: ignore[attr-defined]
        assert faults(declared(), kernel) == ["the reference has another signature"]
    assert faults(declared(), None) == ["no reference kernel"]
    assert faults(declared(), lambda x_TD, weight_D, *, eps: x_TD) == ["the reference does not say what it implements"]


def test_missing_tolerances_are_found() -> None:
    only_float32 = {"float32": TOLERANCES["float32"]}
    assert faults(declared(tolerances=only_float32)) == ["no tolerance for bfloat16"]
    unreasoned = {**TOLERANCES, "float32": replace(TOLERANCES["float32"], reason="")}
    assert faults(declared(tolerances=unreasoned)) == ["the tolerance for float32 is no tolerance"]
    assert faults(declared(tolerances={})) == ["no tolerance for bfloat16", "no tolerance for float32"]


def test_missing_inputs_are_found() -> None:
    assert faults(declared(), cases=[]) == ["no inputs"]
    assert faults(declared(), cases=[case for case in CASES if case.name != "empty"]) == ["no empty input"]
    assert faults(declared(), cases=[*CASES, CASES[0]]) == ["two inputs of one name"]
    rows = load_cases((MANIFEST,), "kv_cache.read_rows")
    without_fp4 = [case for case in rows if case.semantics["cache_format"] != "fp4_group32"]
    reader = OPS["kv_cache.read_rows"]
    assert faults_of(reader, KERNELS[reader.name], without_fp4) == ["no input with cache_format=fp4_group32"]
    products = load_cases((MANIFEST,), "gemm.linear")
    linear = OPS["gemm.linear"]
    without_nvfp4 = [case for case in products if case.formats["weight"] != "nvfp4"]
    assert faults_of(linear, KERNELS[linear.name], without_nvfp4) == ["no input with a weight in nvfp4"]
