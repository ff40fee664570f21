"""Recorded machines: a device and what is installed beside it, so that choices can be explained anywhere.

`explain --device gfx950` answers for a machine that one does not have. Package lists are recorded facts: the set
run on an H200 for NVIDIA, the contents of the project's images for AMD; a profile never looks at this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halocline.hal.device import Device, Vendor
from halocline.hal.errors import DeviceError, lines
from halocline.hal.inventory import Inventory, Package
from halocline.hal.settings import nearest

__all__ = ["PROFILES", "Profile", "cpu_profile", "profile"]

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A recorded machine.

    Attributes:
        device: The device.
        inventory: What is installed on it.
        recorded: Where the package list comes from.
    """

    device: Device
    inventory: Inventory
    recorded: str


def _packages(listing: Mapping[str, tuple[str, tuple[str, ...]]]) -> Inventory:
    return Inventory.of(
        Package(distribution=name, version=version, modules=modules) for name, (version, modules) in listing.items()
    )


# The set of this table was installed and run together; sgl-flash-mla beside it with --no-deps.
_NVIDIA = _packages(
    {
        "apache-tvm-ffi": ("0.1.11", ("tvm_ffi",)),
        "flashinfer-python": ("0.6.15.post1", ("flashinfer",)),
        "humming-kernels": ("0.1.12", ("humming",)),
        "nvidia-ml-py": ("13.580.82", ("pynvml",)),
        "sgl-deep-gemm": ("0.1.4.post1", ("deep_gemm",)),
        "sgl-flash-mla": ("1.0.0", ("flash_mla",)),
        "sglang-kernel": ("0.4.5", ("sgl_kernel", "triton_kernels")),
        "tilelang": ("0.1.15", ("tilelang",)),
        "torch": ("2.11.0+cu130", ("torch",)),
        "triton": ("3.6.0", ("triton",)),
    }
)
_AMD = _packages(
    {
        "amdsmi": ("7.0.2", ("amdsmi",)),
        "tilelang": ("0.1.15", ("tilelang",)),
        "torch": ("2.11.0+rocm7.0", ("torch",)),
        "triton": ("3.6.0", ("triton",)),
    }
)
_CPU = _packages({"torch": ("2.13.0+cpu", ("torch",))})

_H200_SET = "the set that was run on an H200"
_ROCM_SET = "the contents of the project's ROCm image; never seen on a machine"


def _profile(vendor: Vendor, arch: str, name: str, gib: int, inventory: Inventory, recorded: str) -> Profile:
    return Profile(device=Device.of(vendor, arch, name=name, memory=gib * GIB), inventory=inventory, recorded=recorded)


PROFILES: dict[str, Profile] = {
    found.device.arch: found
    for found in (
        _profile("cpu", "cpu", "CPU", 0, _CPU, "a plain CPU install"),
        _profile("nvidia", "sm_90", "H200", 140, _NVIDIA, _H200_SET),
        _profile("nvidia", "sm_100", "B200", 180, _NVIDIA, _H200_SET + "; never seen on a B200"),
        _profile("amd", "gfx90a", "MI210", 64, _AMD, _ROCM_SET),
        _profile("amd", "gfx942", "MI300X", 192, _AMD, _ROCM_SET),
        _profile("amd", "gfx950", "MI355X", 288, _AMD, _ROCM_SET),
        _profile("amd", "gfx1201", "RX 9070 XT", 16, _AMD, _ROCM_SET),
    )
}
_PRODUCTS = {found.device.name.lower().replace(" ", "_"): arch for arch, found in PROFILES.items()}


def profile(name: str) -> Profile:
    """Looks a recorded machine up by architecture (`gfx950`) or product (`mi355x`).

    Raises:
        DeviceError: If there is none of that name, with the nearest one.
    """
    arch = _PRODUCTS.get(name.lower(), name)
    if arch in PROFILES:
        return PROFILES[arch]
    close = nearest(name.lower(), [*PROFILES, *_PRODUCTS])
    raise DeviceError(
        lines(
            f"unknown device {name!r}",
            known=", ".join(f"{arch} ({found.device.name})" for arch, found in PROFILES.items()),
            try_=f"--device {close}" if close else "one of the known devices",
        )
    )


def cpu_profile() -> Device:
    """The CPU as a device."""
    return PROFILES["cpu"].device
