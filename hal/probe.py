"""Finding the device of this process: management libraries first, torch where they are absent or broken.

That torch was built for a vendor does not mean that such a device is here, and that a library imports does not
either. Each process probes for itself, after the visibility variables, and takes the device of its local rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halocline.hal.device import Device, Gpu, Reading, TorchBuild, Vendor, torch_build
from halocline.hal.errors import DeviceError, lines
from halocline.hal.gpu_libraries import read_amdsmi, read_nvml, read_torch, read_torch_elsewhere
from halocline.hal.profiles import cpu_profile
from halocline.hal.settings import Settings
from halocline.hal.visibility import check_visibility, visible_gpus

__all__ = ["Finding", "Sources", "find_devices", "probe"]

# Kernel driver nodes: without one there is no device, whatever is installed. /dev/dxg is WSL's.
_NODES: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("/dev/nvidiactl", "/dev/dxg"),
    "amd": ("/dev/kfd", "/dev/dxg"),
    "cpu": (),
}


def _has_node(vendor: Vendor) -> bool:
    return any(Path(node).exists() for node in _NODES[vendor])


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where facts about devices come from; tests put fakes here.

    Attributes:
        nvml: Reads NVIDIA devices.
        amdsmi: Reads AMD devices.
        torch: Reads what torch sees.
        build: What torch was built for.
        has_node: Whether a driver of a vendor is loaded.
    """

    nvml: Callable[[], Reading] = read_nvml
    amdsmi: Callable[[], Reading] = read_amdsmi
    torch: Callable[[], Reading] = read_torch
    build: Callable[[], TorchBuild | None] = torch_build
    has_node: Callable[[Vendor], bool] = _has_node


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of one vendor.

    Attributes:
        vendor: Whose devices.
        readings: What each source that was asked said.
        visible: Devices that this process may see.
    """

    vendor: Vendor
    readings: tuple[Reading, ...]
    visible: tuple[Gpu, ...]


def probe(settings: Settings, *, sources: Sources | None = None, load_torch: bool = True) -> Device:
    """The device of this process.

    Args:
        settings: Of the process; hold the visibility variables and the local rank.
        sources: Where facts come from; this machine when left out.
        load_torch: Whether torch may be imported here where management libraries cannot tell; otherwise it is asked
            in a process of its own.

    Raises:
        DeviceError: If torch was built for another vendor than the device, a driver does not fit its library, or
            the local rank has no device.
        SettingsError: If visibility variables contradict each other.
    """
    if settings.device == "cpu":
        return cpu_profile()
    sources = sources or Sources(torch=read_torch if load_torch else read_torch_elsewhere)
    build = sources.build()
    findings = find_devices(settings, sources, build)
    if build is None or build.vendor == "cpu":
        return cpu_profile()  # torch cannot drive what may be there; doctor says so
    own = next((finding for finding in findings if finding.vendor == build.vendor), None)
    other = next((finding for finding in findings if finding.vendor != build.vendor and finding.visible), None)
    if own is None or not own.visible:
        _refuse_mismatch(own)
        if other is not None:
            raise _other_vendor(build, other)
        return cpu_profile()
    rank = settings.foreign.get("LOCAL_RANK", "0")
    index = int(rank) if rank.isdigit() else 0
    if index >= len(own.visible):
        raise DeviceError(
            lines(
                f"local rank {index} has no device",
                found=f"{len(own.visible)} visible: {', '.join(gpu.name for gpu in own.visible)}",
                try_="start fewer processes, or widen the visibility variable",
            )
        )
    gpu = own.visible[index]
    return Device.of(
        own.vendor,
        gpu.arch,
        name=gpu.name,
        memory=gpu.memory,
        num_devices=len(own.visible),
        origin=own.readings[-1].source,
    )


def find_devices(settings: Settings, sources: Sources, build: TorchBuild | None) -> tuple[Finding, ...]:
    """Asks every source that can tell, vendor by vendor; a vendor without driver nodes is not asked about."""
    findings: list[Finding] = []
    vendors: tuple[Vendor, ...] = ("nvidia", "amd")
    for vendor in vendors:
        if not sources.has_node(vendor):
            continue
        check_visibility(vendor, settings.foreign)
        readings = [sources.nvml() if vendor == "nvidia" else sources.amdsmi()]
        if _needs_torch(readings[0], settings) and build is not None and build.vendor == vendor:
            readings.append(sources.torch())
        last = readings[-1]
        visible = last.gpus if last.applied else visible_gpus(last.gpus, vendor, settings.foreign)
        findings.append(Finding(vendor=vendor, readings=tuple(readings), visible=visible))
    return tuple(findings)


def _needs_torch(reading: Reading, settings: Settings) -> bool:
    """Whether a management library could not tell, or counts devices in another order than the runtime may."""
    if reading.problem is not None:
        return "mismatch" not in reading.problem.lower()
    mixed = len({gpu.arch for gpu in reading.gpus}) > 1
    return mixed and reading.source == "nvml" and settings.foreign.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"


def _refuse_mismatch(finding: Finding | None) -> None:
    for reading in finding.readings if finding else ():
        if reading.problem is not None and "mismatch" in reading.problem.lower():
            raise DeviceError(
                lines(
                    f"the {finding.vendor if finding else ''} driver does not fit its library",
                    found=reading.problem,
                    try_="reload the driver (usually: reboot), or install the library of the driver's version",
                )
            )


def _other_vendor(build: TorchBuild, other: Finding) -> DeviceError:
    return DeviceError(
        lines(
            f"{build} is installed, but the device here is {other.vendor} {other.visible[0].arch} "
            f"({other.visible[0].name})",
            try_=f"install torch's build for {other.vendor}, or set HALOCLINE_DEVICE=cpu",
        )
    )
