"""Device: the accelerator that kernels are chosen for, and the facts that follow from its architecture.

Capability numbers alone do not name an architecture: an AMD MI210 reports (9, 0), as an NVIDIA H100 does. Facts
hang on the architecture's name (`sm_90`, `gfx942`). `halocline.hal.probe` finds the device of this machine,
`halocline.hal.profiles` holds recorded ones.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "ARCHS",
    "Arch",
    "Device",
    "Fp8Dialect",
    "Gpu",
    "Reading",
    "TorchBuild",
    "Vendor",
    "arch_facts",
    "torch_build",
]

Vendor = Literal["nvidia", "amd", "cpu"]
Fp8Dialect = Literal["ocp", "fnuz"]

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Arch:
    """What follows from an architecture's name.

    Attributes:
        name: `sm_90`, `gfx942`, `cpu`.
        vendor: Who makes it.
        shared_memory: Bytes of on-chip memory that one block (workgroup) may take.
        wave_size: Lanes that run in step.
        fp8_dialect: Of the E4M3 bytes that its matrix units read; `ocp` where it has none.
        features: Hardware features that kernels may need.
        product: A well-known product of it.
    """

    name: str
    vendor: Vendor
    shared_memory: int
    wave_size: int
    fp8_dialect: Fp8Dialect
    features: frozenset[str]
    product: str


def _arch(
    name: str, vendor: Vendor, shared_kib: int, wave: int, dialect: Fp8Dialect, features: str, product: str
) -> tuple[str, Arch]:
    return name, Arch(
        name=name,
        vendor=vendor,
        shared_memory=shared_kib * KIB,
        wave_size=wave,
        fp8_dialect=dialect,
        features=frozenset(features.split()),
        product=product,
    )


# `fp8` means matrix units for E4M3, in the dialect stated; `fp4` means block-scaled E2M1 ones.
ARCHS: dict[str, Arch] = dict(
    (
        _arch("cpu", "cpu", 0, 1, "ocp", "", "CPU"),
        _arch("sm_80", "nvidia", 163, 32, "ocp", "bf16", "A100"),
        _arch("sm_86", "nvidia", 99, 32, "ocp", "bf16", "A10"),
        _arch("sm_89", "nvidia", 99, 32, "ocp", "bf16 fp8 fp8_ocp", "L40S"),
        _arch("sm_90", "nvidia", 227, 32, "ocp", "bf16 fp8 fp8_ocp wgmma tma", "H200"),
        _arch("sm_100", "nvidia", 227, 32, "ocp", "bf16 fp8 fp8_ocp fp4 tcgen05 tma", "B200"),
        _arch("sm_103", "nvidia", 227, 32, "ocp", "bf16 fp8 fp8_ocp fp4 tcgen05 tma", "B300"),
        _arch("sm_120", "nvidia", 99, 32, "ocp", "bf16 fp8 fp8_ocp fp4 tma", "RTX PRO 6000"),
        _arch("gfx90a", "amd", 64, 64, "ocp", "bf16 mfma", "MI210"),
        _arch("gfx942", "amd", 64, 64, "fnuz", "bf16 fp8 fp8_fnuz mfma", "MI300X"),
        _arch("gfx950", "amd", 160, 64, "ocp", "bf16 fp8 fp8_ocp fp4 mfma", "MI355X"),
        _arch("gfx1100", "amd", 64, 32, "ocp", "bf16 wmma", "RX 7900 XTX"),
        _arch("gfx1201", "amd", 64, 32, "ocp", "bf16 fp8 fp8_ocp wmma", "RX 9070 XT"),
    )
)


def arch_facts(vendor: Vendor, name: str) -> Arch:
    """Facts of an architecture; for one that is not in the table, the vendor's most modest ones."""
    if name in ARCHS:
        return ARCHS[name]
    wave = {"nvidia": 32, "amd": 64, "cpu": 1}[vendor]
    return Arch(
        name=name,
        vendor=vendor,
        shared_memory=0 if vendor == "cpu" else 48 * KIB,
        wave_size=wave,
        fp8_dialect="ocp",
        features=frozenset(),
        product="unknown",
    )


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the CPU.

    Attributes:
        vendor: `nvidia`, `amd` or `cpu`.
        arch: Architecture's name.
        name: Product's name as reported, for messages.
        memory: Bytes of device memory; 0 when unknown.
        shared_memory: Bytes of on-chip memory for one block.
        wave_size: Lanes that run in step.
        fp8_dialect: Dialect that its E4M3 units read, and of the caches kept on it; each weight states its own.
        features: Hardware features that kernels may need.
        num_devices: Visible devices of this kind.
        origin: How this is known: `nvml`, `amdsmi`, `torch`, `profile`, `setting`.
    """

    vendor: Vendor
    arch: str
    name: str
    memory: int
    shared_memory: int
    wave_size: int
    fp8_dialect: Fp8Dialect
    features: frozenset[str]
    num_devices: int = 1
    origin: str = "profile"

    @classmethod
    def of(
        cls, vendor: Vendor, arch: str, *, name: str, memory: int, num_devices: int = 1, origin: str = "profile"
    ) -> Device:
        """Builds a device from its architecture's facts."""
        facts = arch_facts(vendor, arch)
        return cls(
            vendor=vendor,
            arch=arch,
            name=name,
            memory=memory,
            shared_memory=facts.shared_memory,
            wave_size=facts.wave_size,
            fp8_dialect=facts.fp8_dialect,
            features=facts.features,
            num_devices=num_devices,
            origin=origin,
        )

    @property
    def is_gpu(self) -> bool:
        """Whether this is an accelerator."""
        return self.vendor != "cpu"

    @property
    def torch_device(self) -> str:
        """The device string in torch's words: ROCm builds reuse the name of the other vendor."""
        return "cuda" if self.is_gpu else "cpu"

    def __str__(self) -> str:
        return f"{self.vendor} {self.arch} ({self.name})" if self.is_gpu else "cpu"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device as a management library reports it.

    Attributes:
        uuid: `GPU-...`, or `MIG-...` for a partition.
        name: Product's name.
        arch: Architecture's name.
        memory: Bytes.
        parts: Its partitions, when it is partitioned.
    """

    uuid: str
    name: str
    arch: str
    memory: int
    parts: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one source says about the devices of a vendor.

    Attributes:
        source: `nvml`, `amdsmi` or `torch`.
        gpus: Devices, in the order of the source.
        driver: Version of the driver, where the source tells.
        problem: Why the source cannot tell; None when it could.
        applied: Whether the visibility variables are applied already.
    """

    source: str
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    problem: str | None = None
    applied: bool = False


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for.

    Attributes:
        version: Of torch.
        vendor: Whose devices it drives.
        toolkit: Version of the vendor's toolkit; empty for a CPU build.
    """

    version: str
    vendor: Vendor
    toolkit: str

    def __str__(self) -> str:
        return f"torch {self.version} for {self.vendor} {self.toolkit}".rstrip()


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Reads torch's version file as text, without importing torch.

    Args:
        folder: Of the package; found on the path when left out.

    Returns:
        The build, or None when torch is not installed.
    """
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(spec.submodule_search_locations[0])
    file = folder / "version.py"
    if not file.is_file():
        return None
    found = dict(
        re.findall(r"^(\w+)\s*(?::[^=\n]*)?=\s*['\"]([^'\"]*)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE)
    )
    if found.get("hip"):  # first: a ROCm build answers to CUDA's name in much of its interface
        return TorchBuild(version=found.get("__version__", ""), vendor="amd", toolkit=found["hip"])
    if found.get("cuda"):
        return TorchBuild(version=found.get("__version__", ""), vendor="nvidia", toolkit=found["cuda"])
    return TorchBuild(version=found.get("__version__", ""), vendor="cpu", toolkit="")
