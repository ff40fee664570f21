"""Every kernel set of a GPU session can be bound on the recorded H200, for each model that is measured."""

from __future__ import annotations

import pytest

from halocline.benchmarks.gpu_sizes import FULL, KERNEL_SETS
from halocline.hal.backend import load_manifests
from halocline.hal.formats import recipe
from halocline.hal.inventory import Inventory
from halocline.hal.offline import Workbench
from halocline.hal.profiles import profile
from halocline.hal.settings import Settings
from halocline.hal.startup import choose_kernels
from halocline.hal.table import KernelTable
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.presets import VENDOR_TINY, first_layers
from halocline.models.deepseek_v4.requests import kernel_requests

H200 = profile("sm_90")
MODELS = {
    "flash": first_layers(FULL.flash, 8),
    "pro": first_layers(FULL.pro, 4),
    "graph": FULL.graph,
    "graded": VENDOR_TINY.without_draft(),
}


def table_of(
    config: DeepseekV4Config, flags: tuple[str, ...], inventory: Inventory, *, graphs: bool = True
) -> KernelTable:
    served = recipe("served")
    return choose_kernels(
        lambda device, layout: kernel_requests(config, served, prefill_layout=layout, cache_dialect=device.fp8_dialect),
        settings=Settings.read({}),
        flags=flags,
        device=H200.device,
        inventory=inventory,
        graphs=graphs,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", KERNEL_SETS)
def test_a_set_binds_every_op(name: str, model: str) -> None:
    table = table_of(MODELS[model], KERNEL_SETS[name], H200.inventory)
    chosen = {row["op"]: row["chosen"] for row in table.rows()}
    assert all(chosen.values())
    assert "reference" not in chosen.values()
    if name == "portable":
        assert set(chosen.values()) <= {"triton", "torch", "nccl"}
    if name == "tilelang":
        assert chosen["attention.sparse_decode"] == chosen["attention.sparse_prefill"] == "tilelang"


def test_the_default_takes_the_libraries_that_are_there() -> None:
    table = table_of(MODELS["flash"], (), H200.inventory)
    chosen = {row["op"]: row["chosen"] for row in table.rows()}
    assert chosen["attention.sparse_decode"] == "flashmla"
    assert chosen["gemm.linear"] == "deep_gemm"
    assert chosen["moe.experts"] == "triton_kernels"


def test_the_reference_can_be_asked_for_by_name_to_compare_with() -> None:
    """Full-width layers are held against the reference on the device itself."""
    chosen = {row["op"]: row["chosen"] for row in table_of(MODELS["flash"], ("*=reference",), H200.inventory).rows()}
    assert set(chosen.values()) == {"reference"}


def test_every_override_and_every_comparison_can_be_bound() -> None:
    """What the parts `overrides` and `generation` ask for, one op after the other, on the recorded packages."""
    bench = Workbench(manifests=load_manifests(), device=H200.device, inventory=H200.inventory)
    portable = KERNEL_SETS["portable"]
    served = {row["op"]: row["chosen"] for row in table_of(MODELS["graded"], (), H200.inventory).rows()}
    count = 0
    for op, default in served.items():
        own = [spec for spec in bench.candidates(op) if spec.vendor in ("", "nvidia") and not bench.against(spec)]
        for spec in own:
            table_of(MODELS["graded"], (*portable, f"{op}={spec.name}"), H200.inventory)
            count += 1
        if default not in {"triton", "torch", "nccl"}:
            table_of(MODELS["graded"], (*portable, f"{op}=compare({default},reference)"), H200.inventory, graphs=False)
    assert count > len(served)
