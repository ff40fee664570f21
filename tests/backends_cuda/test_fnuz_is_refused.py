"""FNUZ codes do not compile into products on NVIDIA devices: every kernel there is refused for that reason."""

from __future__ import annotations

import pytest

from halocline.backends_cuda.manifest import MANIFEST
from halocline.hal.inventory import Inventory
from halocline.hal.op import KernelSpec
from halocline.hal.profiles import PROFILES
from halocline.hal.request import KernelRequest
from halocline.hal.stages import Policy, reasons_against

SPECS = [spec for spec in MANIFEST.specs if "fp8_dialect" in spec.semantics]


def test_products_state_their_dialect() -> None:
    assert {"gemm.linear", "moe.experts", "attention.output", "indexer.logits"} <= {spec.op for spec in SPECS}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.op}-{spec.name}")
def test_a_kernel_is_refused(spec: KernelSpec) -> None:
    def reasons(dialect: str) -> list[str]:
        request = KernelRequest(
            op=spec.op,
            formats={name: values[:1] for name, values in spec.formats.items()},
            semantics={name: values[:1] for name, values in spec.semantics.items()} | {"fp8_dialect": (dialect,)},
        )
        found = reasons_against(spec, request, PROFILES["sm_90"].device, Inventory.of(()), Policy())
        return [reason for stage, reason in found if stage == "semantics"]

    assert reasons("ocp") == []
    assert len(reasons("fnuz")) == 1
    assert reasons("fnuz")[0].startswith("fp8_dialect=fnuz is asked for, it takes ocp")
