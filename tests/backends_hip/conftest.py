"""Adapters of AMD's libraries over stand-ins, on the CPU, with the reference's inputs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.kv_cache import read_rows_reference
from halocline.backends_reference.manifest import MANIFEST as REFERENCE
from halocline.hal.codecs import decode_ue8m0, quantize_fp8_groups
from halocline.hal.offline import load_cases
from halocline.hal.ops import Ops, find_op
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.runtime import prepare_name

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # importlib mode leaves test folders out
    sys.path.insert(0, str(HERE))

from library_fakes import Calls, install  # noqa: E402 (after its folder is on the path)

ADAPTERS = "halocline.backends_hip."


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> Iterator[Callable[[str], ModuleType]]:
    """Imports an adapter module anew over stand-ins; portable kernels that it calls are replaced by formulas."""
    install(monkeypatch, calls)
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        module = importlib.import_module(ADAPTERS + name)
        _replace_portable(monkeypatch)
        return module

    yield load
    for name in set(sys.modules) - before:
        if name.startswith(ADAPTERS):
            del sys.modules[name]
            delattr(sys.modules[ADAPTERS.rstrip(".")], name.removeprefix(ADAPTERS))


def _replace_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    from halocline.backends_hip import attention_rows
    from halocline.backends_triton import fp8_matrix, prefill_workspace

    def read_rows(pages: Tensor, layout: Any, slots: Tensor, *, dtype: Any = None, out_ND: Any = None) -> Tensor:
        rows = read_rows_reference(CacheHandle(layout=layout, num_pages=len(pages), pages=pages), slots)
        return rows.to(dtype) if out_ND is None else out_ND.copy_(rows)

    def quantize(x: Tensor, *, fp8_dialect: str) -> tuple[Tensor, Tensor]:
        codes, scales = quantize_fp8_groups(x, 128)
        scales = decode_ue8m0(scales)
        if fp8_dialect == "ocp":
            return codes, scales
        byte = codes.view(torch.uint8)
        return torch.where(byte == 0x80, 0, byte).view(torch.float8_e4m3fnuz), scales * 2

    monkeypatch.setattr(attention_rows, "read_rows", read_rows)
    monkeypatch.setattr(prefill_workspace, "read_rows", read_rows)
    monkeypatch.setattr(fp8_matrix, "quantize_activation", quantize)


@pytest.fixture
def on_fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of this test lie on a device that reads FNUZ."""
    monkeypatch.setattr("halocline.backends_triton.device_facts.fp8_dialect_of", lambda _: "fnuz")


def reference_kernels() -> dict[str, Callable[..., Any]]:
    """Every reference kernel, and its load-time conversions."""
    kernels: dict[str, Callable[..., Any]] = {}
    for spec in REFERENCE.specs:
        for name, target in ((spec.op, spec.target), (prepare_name(spec.op), spec.prepare)):
            if target:
                module, _, attribute = target.partition(":")
                kernels[name] = getattr(importlib.import_module(module), attribute)
    return kernels


@pytest.fixture(scope="session")
def run_case() -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Runs a case of the reference backend with other kernels; gives their outputs and the reference's."""
    reference = reference_kernels()

    def run(case: Any, **kernels: Callable[..., Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        own = {name.replace("__", "."): kernel for name, kernel in kernels.items()}
        found = case.run(Ops({**reference, **own}), "cpu")
        return dict(found), dict(case.run(Ops(reference), "cpu"))

    return run


@pytest.fixture(scope="session")
def cases_of() -> Callable[..., list[Any]]:
    """Small cases of an op whose formats and meanings are these; in bfloat16 where the op has such inputs."""

    def find(op: str, **wanted: str) -> list[Any]:
        assert find_op(op) is not None
        found = [case for case in load_cases([REFERENCE], op) if case.size == "small"]
        found = [case for case in found if case.dtype == "bfloat16"] or found
        kept = [c for c in found if all({**c.formats, **c.semantics}.get(k) == v for k, v in wanted.items())]
        assert kept, f"no case of {op} with {wanted}"
        return kept

    return find
