"""The doctor: what it looks at, what is a fault and what a remark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halocline.hal.device import Gpu, Reading, TorchBuild
from halocline.hal.doctor import Check, Report, diagnose, import_in_process
from halocline.hal.inventory import Inventory, local_inventory
from halocline.hal.op import KernelSpec, Provider
from halocline.hal.probe import Sources
from halocline.hal.settings import Settings

H200 = Gpu(uuid="GPU-1", name="NVIDIA H200", arch="sm_90", memory=1)
CUDA = TorchBuild(version="2.11.0+cu130", vendor="nvidia", toolkit="13.0")
CPU = TorchBuild(version="2.13.0+cpu", vendor="cpu", toolkit="")
MLA = Provider(distribution="sgl-flash-mla", versions=">=1.0,<1.1", module="flash_mla")
OTHER_MLA = Provider(distribution="tokenspeed-flashmla", versions=">=1.0", module="flash_mla")
KERNELS = (
    KernelSpec(op="norm.rms_norm", name="mla", target="a:b", vendor="nvidia", providers=(MLA, OTHER_MLA), rank=60),
    KernelSpec(op="norm.rms_norm", name="portable", target="a:b", vendor="nvidia", rank=20),
    KernelSpec(op="norm.rms_norm", name="reference", target="a:b"),
)


def machine(build: TorchBuild | None, *gpus: Gpu, problem: str | None = None) -> Sources:
    return Sources(
        nvml=lambda: Reading(source="nvml", gpus=gpus, driver="580.159", problem=problem),
        amdsmi=lambda: Reading(source="amdsmi", problem="not here"),
        torch=lambda: Reading(source="torch", gpus=gpus, applied=True),
        build=lambda: build,
        has_node=lambda vendor: vendor == "nvidia" and (bool(gpus) or problem is not None),
    )


def report(
    sources: Sources,
    inventory: Inventory | None = None,
    *,
    importer: Callable[[str], str | None] = lambda _: None,
    specs: tuple[KernelSpec, ...] = KERNELS,
    tmp: Path = Path("/tmp"),
    **environment: str,
) -> Report:
    settings = Settings.read({"HOME": str(tmp), **environment})
    return diagnose(settings, specs, sources=sources, inventory=inventory or Inventory(), importer=importer)


def check(found: Report, name: str) -> Check:
    return next(c for c in found.checks if c.name == name)


def test_a_healthy_machine(tmp_path: Path) -> None:
    found = report(machine(CUDA, H200), tmp=tmp_path)
    assert found.healthy
    assert check(found, "torch").found == "torch 2.11.0+cu130 for nvidia 13.0"
    assert check(found, "nvidia devices by nvml").found == "NVIDIA H200 sm_90; driver 580.159"
    assert check(found, "device").found == "nvidia sm_90 (NVIDIA H200)"
    assert check(found, "kernels").state == "ok"
    assert found.to_json()["healthy"] is True


def test_an_absent_library_is_a_remark_with_its_remedy(tmp_path: Path) -> None:
    found = check(report(machine(CUDA, H200), tmp=tmp_path), "sgl-flash-mla (flash_mla)")
    assert (found.state, found.found) == ("remark", "not installed")
    assert found.remedy == "pip install --no-deps sgl-flash-mla==1.0.0"


def test_a_good_library_shows_version_and_range(tmp_path: Path, install: Callable[..., Path]) -> None:
    site = install("sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    inventory = local_inventory({"flash_mla"}, set(), path=[str(site)])
    found = check(report(machine(CUDA, H200), inventory, tmp=tmp_path), "sgl-flash-mla (flash_mla)")
    assert (found.state, found.found) == ("ok", "1.0.0, in >=1.0,<1.1, imports")


def test_two_owners_of_a_module_are_flagged(tmp_path: Path, install: Callable[..., Path]) -> None:
    install("sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    site = install("tokenspeed-flashmla", "1.0.1", {"flash_mla": ""})
    inventory = local_inventory({"flash_mla"}, set(), path=[str(site)])
    found = report(machine(CUDA, H200), inventory, tmp=tmp_path)
    assert not found.healthy
    for name in ("sgl-flash-mla", "tokenspeed-flashmla"):
        state = check(found, f"{name} (flash_mla)")
        assert state.state == "fault"
        assert "owned by sgl-flash-mla and tokenspeed-flashmla at once" in state.found


@pytest.mark.parametrize(("build", "gpus", "state"), [(CUDA, (H200,), "fault"), (CPU, (), "remark")])
def test_a_library_that_does_not_import_is_a_fault_only_for_its_vendors_device(
    tmp_path: Path, install: Callable[..., Path], build: TorchBuild, gpus: tuple[Gpu, ...], state: str
) -> None:
    site = install("sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    inventory = local_inventory({"flash_mla"}, set(), path=[str(site)])
    found = report(
        machine(build, *gpus), inventory, importer=lambda _: "ImportError: libcuda.so.1: not found", tmp=tmp_path
    )
    broken = check(found, "sgl-flash-mla (flash_mla)")
    assert (broken.state, "libcuda.so.1" in broken.found) == (state, True)
    assert found.healthy is (state == "remark")


def test_torch_that_cannot_drive_the_device_is_a_fault(tmp_path: Path) -> None:
    found = report(machine(CPU, H200), tmp=tmp_path)
    assert not found.healthy
    assert check(found, "device").found == "cpu; NVIDIA H200 is here, but torch 2.13.0+cpu for cpu cannot drive it"


def test_no_torch_is_a_fault(tmp_path: Path) -> None:
    assert check(report(machine(None), tmp=tmp_path), "torch").state == "fault"


def test_a_driver_mismatch_is_one_fault_not_a_crash(tmp_path: Path) -> None:
    found = report(machine(CUDA, problem="NVMLError: Driver/library version mismatch"), tmp=tmp_path)
    assert found.device is None
    assert check(found, "device").found == "the nvidia driver does not fit its library"


def test_an_op_without_a_kernel_is_a_fault(tmp_path: Path) -> None:
    planned = KernelSpec(op="norm.rms_norm", name="p", target="a:b", vendor="nvidia", status="planned")
    found = report(machine(CUDA, H200), specs=(KERNELS[0], KERNELS[2], planned), tmp=tmp_path)
    assert check(found, "kernels").found == "none for 1 ops: norm.rms_norm"


def test_a_cache_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    variables = {"HALOCLINE_CACHE_DIR": str(file / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    found = report(machine(CPU), tmp=tmp_path, **variables)
    folder = check(found, "cache folder HALOCLINE_CACHE_DIR")
    assert (folder.state, folder.remedy) == ("fault", "set HALOCLINE_CACHE_DIR to a folder that can")
    assert check(found, "cache folder TRITON_CACHE_DIR").state == "ok"
    assert check(found, "cache folder DG_JIT_CACHE_DIR").state == "fault"
    assert not (file / "cache").exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", None),
        ("raise ImportError('libx.so.1: cannot open')", "ImportError: libx.so.1: cannot open"),
        ("import os; os.abort()", "the process died with signal 6"),
        ("import sys; sys.exit(3)", "no message"),
    ],
)
def test_an_import_is_tried_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str | None
) -> None:
    (tmp_path / "strange_library.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_in_process("strange_library") == expected
