"""Finding the device: libraries absent or broken, mixed orders, partitions, torch's build against what is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halocline.hal.device import Device, Gpu, Reading, TorchBuild, arch_facts, torch_build
from halocline.hal.errors import DeviceError, SettingsError
from halocline.hal.gpu_libraries import read_amdsmi, read_nvml
from halocline.hal.probe import Sources, find_devices, probe
from halocline.hal.profiles import PROFILES, profile
from halocline.hal.settings import Settings
from halocline.hal.visibility import VisibleList, check_visibility, visible_gpus

GIB = 1024**3
H200 = Gpu(uuid="GPU-aa11", name="NVIDIA H200", arch="sm_90", memory=140 * GIB)
B200 = Gpu(uuid="GPU-bb22", name="NVIDIA B200", arch="sm_100", memory=180 * GIB)
MI300X = Gpu(uuid="GPU-cc33", name="AMD Instinct MI300X", arch="gfx942", memory=192 * GIB)
CUDA = TorchBuild(version="2.11.0+cu130", vendor="nvidia", toolkit="13.0")
ROCM = TorchBuild(version="2.11.0+rocm7.0", vendor="amd", toolkit="7.0.51831")
CPU = TorchBuild(version="2.13.0+cpu", vendor="cpu", toolkit="")


def absent(source: str) -> Callable[[], Reading]:
    return lambda: Reading(source=source, problem="ModuleNotFoundError: No module named 'x'")


def forbidden() -> Reading:
    raise AssertionError("torch was asked although nothing made it necessary")


def sources(
    build: TorchBuild | None,
    *,
    nvml: Reading | None = None,
    amdsmi: Reading | None = None,
    torch: Callable[[], Reading] = forbidden,
    nodes: tuple[str, ...] = (),
) -> Sources:
    return Sources(
        nvml=(lambda: nvml) if nvml else absent("nvml"),
        amdsmi=(lambda: amdsmi) if amdsmi else absent("amdsmi"),
        torch=torch,
        build=lambda: build,
        has_node=lambda vendor: vendor in nodes,
    )


def nvidia(*gpus: Gpu, **changes: Any) -> Sources:
    return sources(CUDA, nvml=Reading(source="nvml", gpus=gpus, driver="580.159"), nodes=("nvidia",), **changes)


def amd(*gpus: Gpu, **changes: Any) -> Sources:
    return sources(ROCM, amdsmi=Reading(source="amdsmi", gpus=gpus), nodes=("amd",), **changes)


def found(where: Sources, **environment: str) -> Device:
    return probe(Settings.read(environment), sources=where)


# ---- probing ----------------------------------------------------------------------------------------------------


def test_a_device_is_found_without_torch() -> None:
    device = found(nvidia(H200, H200))
    assert (device.vendor, device.arch, device.name, device.num_devices, device.origin) == (
        "nvidia", "sm_90", "NVIDIA H200", 2, "nvml",
    )  # fmt: skip
    assert (device.shared_memory, device.wave_size, device.fp8_dialect) == (227 * 1024, 32, "ocp")
    assert (device.torch_device, str(device)) == ("cuda", "nvidia sm_90 (NVIDIA H200)")
    device = found(amd(MI300X))
    assert (device.vendor, device.arch, device.wave_size, device.fp8_dialect) == ("amd", "gfx942", 64, "fnuz")
    assert device.torch_device == "cuda"  # a ROCm build reuses the name


@pytest.mark.parametrize("build", [CUDA, ROCM, CPU, None])
def test_a_torch_built_for_a_vendor_does_not_mean_a_device(build: TorchBuild | None) -> None:
    assert found(sources(build)).vendor == "cpu"


def test_without_the_management_library_torch_is_asked() -> None:
    """As under WSL, where it is absent or broken."""
    seen = Reading(source="torch", gpus=(H200,), applied=True)
    device = found(sources(CUDA, torch=lambda: seen, nodes=("nvidia",)))
    assert (device.arch, device.origin) == ("sm_90", "torch")


def test_when_neither_can_tell_it_is_a_cpu() -> None:
    silent = Reading(source="torch", problem="torch sees no accelerator", applied=True)
    assert found(sources(CUDA, torch=lambda: silent, nodes=("nvidia",))).vendor == "cpu"


def test_devices_of_two_kinds_are_counted_by_the_runtime_not_by_the_bus() -> None:
    """The runtime puts the fastest first; the management library goes by the bus."""
    seen = Reading(source="torch", gpus=(B200, H200), applied=True)
    mixed = nvidia(H200, B200, torch=lambda: seen)
    assert found(mixed).arch == "sm_100"
    assert found(nvidia(H200, B200), CUDA_DEVICE_ORDER="PCI_BUS_ID").arch == "sm_90"


def test_each_worker_takes_the_device_of_its_rank() -> None:
    both = nvidia(H200, B200)
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found(both, **environment, LOCAL_RANK="0").arch == "sm_90"
    assert found(both, **environment, LOCAL_RANK="1").arch == "sm_100"
    with pytest.raises(DeviceError, match="local rank 2 has no device"):
        found(both, **environment, LOCAL_RANK="2")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            sources(CUDA, amdsmi=Reading(source="amdsmi", gpus=(MI300X,)), nodes=("amd",)),
            "torch 2.11.0+cu130 for nvidia 13.0 is installed, but the device here is amd gfx942 (AMD Instinct MI300X)",
        ),
        (
            sources(ROCM, nvml=Reading(source="nvml", gpus=(H200,)), nodes=("nvidia",)),
            "torch 2.11.0+rocm7.0 for amd 7.0.51831 is installed, but the device here is nvidia sm_90 (NVIDIA H200)",
        ),
    ],
)
def test_torch_for_another_vendor_than_the_device_is_one_clear_line(where: Sources, message: str) -> None:
    with pytest.raises(DeviceError) as caught:
        found(where)
    assert str(caught.value).splitlines()[0] == message
    assert "HALOCLINE_DEVICE=cpu" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_driver_that_does_not_fit_its_library_is_one_clear_line() -> None:
    broken = Reading(source="nvml", problem="NVMLError_LibRmVersionMismatch: Driver/library version mismatch")
    with pytest.raises(DeviceError) as caught:
        found(sources(CUDA, nvml=broken, nodes=("nvidia",)))
    first, second, _ = str(caught.value).splitlines()
    assert first == "the nvidia driver does not fit its library"
    assert "Driver/library version mismatch" in second


def test_the_cpu_can_be_asked_for() -> None:
    assert found(nvidia(H200), HALOCLINE_DEVICE="cpu").vendor == "cpu"


def test_hidden_devices_leave_the_cpu() -> None:
    assert found(nvidia(H200), CUDA_VISIBLE_DEVICES="").vendor == "cpu"
    assert found(nvidia(H200), CUDA_VISIBLE_DEVICES="-1").vendor == "cpu"


def test_both_vendors_in_one_machine_follow_torchs_build() -> None:
    readings = {
        "nvml": Reading(source="nvml", gpus=(H200,)),
        "amdsmi": Reading(source="amdsmi", gpus=(MI300X,)),
        "nodes": ("nvidia", "amd"),
    }
    assert found(sources(CUDA, **readings)).arch == "sm_90"
    assert found(sources(ROCM, **readings)).arch == "gfx942"
    assert len(find_devices(Settings.read({}), sources(CPU, **readings), CPU)) == 2


# ---- torch's build, as text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", CUDA),
        (
            "__version__ = '2.11.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n",
            ROCM,
        ),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", CPU),
        ('__version__ = "2.0"\ncuda = "12.1"\n', TorchBuild(version="2.0", vendor="nvidia", toolkit="12.1")),
    ],
)
def test_the_build_is_read_without_importing_torch(tmp_path: Path, text: str, expected: TorchBuild) -> None:
    (tmp_path / "version.py").write_text(text)
    assert torch_build(tmp_path) == expected


def test_the_build_that_is_installed_here_is_what_torch_says() -> None:
    import torch

    build = torch_build()
    assert build is not None
    assert build.version == torch.__version__
    assert build.toolkit == (torch.version.hip or torch.version.cuda or "")


# ---- management libraries ---------------------------------------------------------------------------------------


class FakeNvml:
    """NVML as nvidia-ml-py shows it, with one partitioned device."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"GPU-{handle}" if isinstance(handle, int) else str(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=140 * GIB if isinstance(handle, int) else 18 * GIB)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle == 0:
            raise self.NVMLError("Not Supported")
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> str:
        if number == 1:
            raise self.NVMLError("Not Found")
        return f"MIG-{handle}{number}"


def test_nvml_is_read_and_closed() -> None:
    library = FakeNvml()
    reading = read_nvml(lambda: library)
    assert (reading.problem, reading.driver, library.open) == (None, "580.159.04", 0)
    assert [(gpu.arch, gpu.uuid, len(gpu.parts)) for gpu in reading.gpus] == [
        ("sm_90", "GPU-0", 0),
        ("sm_90", "GPU-1", 2),
    ]
    assert [part.uuid for part in reading.gpus[1].parts] == ["MIG-10", "MIG-12"]
    assert reading.gpus[1].parts[0].memory == 18 * GIB


def test_a_partition_is_a_device_of_its_own_size() -> None:
    reading = read_nvml(FakeNvml)
    device = found(sources(CUDA, nvml=reading, nodes=("nvidia",)), CUDA_VISIBLE_DEVICES="MIG-12")
    assert (device.arch, device.memory, device.num_devices) == ("sm_90", 18 * GIB, 1)


def test_an_absent_library_is_a_reason_not_a_crash() -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert read_nvml(missing).problem == "ModuleNotFoundError: No module named 'pynvml'"
    assert "No module named" in str(read_amdsmi(missing).problem)


def test_amdsmi_is_read_by_architecture_name() -> None:
    closed: list[bool] = []
    library = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: closed.append(True),
        amdsmi_get_processor_handles=lambda: ["handle"],
        amdsmi_get_gpu_asic_info=lambda _: {"target_graphics_version": "gfx942", "market_name": "MI300X"},
        amdsmi_get_gpu_vram_info=lambda _: {"vram_size": 196592},
        amdsmi_get_gpu_device_uuid=lambda _: "ff00-11",
    )
    reading = read_amdsmi(lambda: library)
    assert closed == [True]
    assert reading.gpus == (Gpu(uuid="GPU-ff00-11", name="MI300X", arch="gfx942", memory=196592 * 1024**2),)


# ---- visibility -------------------------------------------------------------------------------------------------

FOUR = tuple(Gpu(uuid=f"GPU-{n}f", name=str(n), arch="sm_90", memory=1) for n in range(4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "0"),
        ("2,0", "20"),
        (" 1 , 3 ", "13"),
        ("", ""),
        ("-1", ""),
        ("1,-1,2", "1"),
        ("0,7,1", "0"),
        ("0,,1", "0"),
        ("GPU-2f", "2"),
        ("gpu-3", "3"),
        ("GPU-1,GPU-0f", "10"),
        ("GPU-", ""),
        ("nonsense,0", ""),
    ],
)
def test_a_list_is_read_as_the_driver_reads_it(text: str, expected: str) -> None:
    seen = visible_gpus(FOUR, "nvidia", {"CUDA_VISIBLE_DEVICES": text})
    assert "".join(gpu.name for gpu in seen) == expected


def test_without_the_variable_everything_is_visible() -> None:
    assert visible_gpus(FOUR, "nvidia", {}) == FOUR
    assert visible_gpus(FOUR, "nvidia", {"HIP_VISIBLE_DEVICES": "0"}) == FOUR


def test_a_device_named_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="CUDA_VISIBLE_DEVICES names device 1 twice"):
        VisibleList.parse("CUDA_VISIBLE_DEVICES", "1,0,1")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, "31"),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-2f", "HIP_VISIBLE_DEVICES": "0"}, "2"),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0, 1"}, "01"),
        ({"HIP_VISIBLE_DEVICES": ""}, ""),
    ],
)
def test_amds_variables_are_read_in_their_order(environment: dict[str, str], expected: str) -> None:
    assert "".join(gpu.name for gpu in visible_gpus(FOUR, "amd", environment)) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
            "HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES differ",
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"},
            "HIP_VISIBLE_DEVICES counts within what ROCR_VISIBLE_DEVICES leaves, and asks for device 2 of 1",
        ),
    ],
)
def test_contradicting_variables_are_refused_before_anything_runs(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_visibility("amd", environment)
    with pytest.raises(SettingsError, match=message):
        found(amd(MI300X), **environment)
    check_visibility("nvidia", environment)


# ---- profiles ---------------------------------------------------------------------------------------------------


def test_the_recorded_devices() -> None:
    assert set(PROFILES) == {"cpu", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950", "gfx1201"}
    assert {name: found.device.shared_memory // 1024 for name, found in PROFILES.items()} == {
        "cpu": 0, "sm_90": 227, "sm_100": 227, "gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1201": 64,
    }  # fmt: skip
    assert {name: found.device.wave_size for name, found in PROFILES.items()} == {
        "cpu": 1, "sm_90": 32, "sm_100": 32, "gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1201": 32,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "arch"), [("gfx950", "gfx950"), ("MI355X", "gfx950"), ("h200", "sm_90")])
def test_a_device_is_known_by_architecture_and_by_product(name: str, arch: str) -> None:
    assert profile(name).device.arch == arch


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(DeviceError) as caught:
        profile("gfx952")
    assert re.search(r"try    --device gfx9(42|50)$", str(caught.value))
    assert "gfx950 (MI355X)" in str(caught.value)


def test_an_architecture_outside_the_table_gets_modest_facts() -> None:
    facts = arch_facts("nvidia", "sm_75")
    assert (facts.shared_memory, facts.features) == (48 * 1024, frozenset())
