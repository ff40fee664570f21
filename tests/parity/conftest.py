"""A backend whose kernels are formulas in float64, the workbenches of this machine, and kernels with planted faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halocline.backends_reference.manifest import MANIFEST as REFERENCE
from halocline.hal.backend import Manifest
from halocline.hal.inventory import Inventory
from halocline.hal.offline import Workbench
from halocline.hal.op import KernelSpec
from halocline.hal.profiles import profile

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # importlib mode leaves test folders out, and kernels are found by module name
    sys.path.insert(0, str(HERE))


def _spec(reference: KernelSpec, target: str, prepare: str = "") -> KernelSpec:
    """A kernel of the CPU that takes and honours all that the reference does."""
    return KernelSpec(
        op=reference.op,
        name=target.partition(":")[0],
        target=target,
        prepare=prepare,
        vendor="cpu",
        formats=reference.formats,
        semantics=reference.semantics,
        rank=1,
    )


@pytest.fixture(scope="session")
def bench_with() -> Callable[..., Workbench]:
    """A workbench of the CPU with the reference and one more kernel, `module:function` of this folder."""

    def make(op: str, target: str, prepare: str = "") -> Workbench:
        (reference,) = (spec for spec in REFERENCE.specs if spec.op == op)
        own = Manifest(name="tested", vendor="cpu", specs=(_spec(reference, target, prepare),))
        return Workbench(manifests=(REFERENCE, own), device=profile("cpu").device, inventory=Inventory.of(()))

    return make


@pytest.fixture
def spec_of() -> Callable[[Workbench, str], Any]:
    """The one kernel beside the reference."""

    def find(bench: Workbench, op: str) -> KernelSpec:
        (spec,) = (spec for spec in bench.candidates(op) if spec.name != "reference")
        return spec

    return find
