"""The shared wrappers over kernels in Triton's interpreter, on the inputs of the reference backend.

The interpreter and its repairs are those of `tests/kernels_portable`; wrappers are imported anew within, because they
hold on to the kernels that they were imported with.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from halocline.backends_reference.manifest import MANIFEST as REFERENCE
from halocline.hal.offline import load_cases
from halocline.hal.ops import Ops
from halocline.hal.runtime import prepare_name

WRAPPERS = "halocline.backends_triton"


def _interpreter() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "kernels_portable" / "conftest.py"
    spec = importlib.util.spec_from_file_location("interpreter_of_portable_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INTERPRETER = _interpreter()
_fresh: dict[str, ModuleType] = {}


def _take() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith(WRAPPERS)}


@contextmanager
def _wrappers() -> Iterator[None]:
    before = _take()
    sys.modules.update(_fresh)
    try:
        with INTERPRETER.interpreted():
            yield
    finally:
        _fresh.update(_take())
        sys.modules.update(before)


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


@pytest.fixture
def interpreted_parity() -> Iterator[Callable[[Any, Any], tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """Runs a case with the wrapper of a record, interpreted, and with the reference."""
    reference = {spec.op: _function(spec.target) for spec in REFERENCE.specs}
    reference |= {prepare_name(spec.op): _function(spec.prepare) for spec in REFERENCE.specs if spec.prepare}
    with _wrappers():

        def run(case: Any, spec: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            own = {spec.op: _function(spec.target)}
            own |= {prepare_name(spec.op): _function(spec.prepare)} if spec.prepare else {}
            with pytest.MonkeyPatch.context() as patch:
                if case.semantics.get("fp8_dialect") == "fnuz":  # as on a device that reads it
                    for name in [name for name in sys.modules if name.startswith(WRAPPERS)]:
                        patch.setattr(sys.modules[name], "fp8_dialect_of", lambda _: "fnuz", raising=False)
                found = dict(case.run(Ops({**reference, **own}), "cpu"))
            return found, dict(case.run(Ops(reference), "cpu"))

        yield run


@pytest.fixture(scope="session")
def small_cases() -> Callable[[str], list[Any]]:
    """The inputs of an op that a CPU can afford."""
    return lambda op: [case for case in load_cases([REFERENCE], op) if case.size == "small"]


def pytest_unconfigure() -> None:
    """Gives the interpreted copies back to Python."""
    INTERPRETER.pytest_unconfigure()
