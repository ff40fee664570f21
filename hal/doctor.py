"""Checks of this machine: device, torch's build, kernel libraries, who owns which module, cache folders.

Libraries are imported in processes of their own: an import may abort, print or take long. A check that fails for
another vendor's device is a remark, not a fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halocline.hal.device import Device, Reading, TorchBuild
from halocline.hal.errors import DeviceError, SettingsError
from halocline.hal.inventory import Inventory
from halocline.hal.op import KernelSpec, Provider
from halocline.hal.probe import Finding, Sources, find_devices, probe
from halocline.hal.providers import choose_provider, provider_problem
from halocline.hal.settings import Settings
from halocline.hal.stages import REFERENCE, status_on
from halocline.hal.startup import installed_for

__all__ = ["Check", "Report", "coverage_check", "diagnose", "import_in_process", "library_checks"]

State = Literal["ok", "remark", "fault"]
_IMPORT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        state: `ok`, `remark` (worth knowing, harmless for this device) or `fault`.
        found: What was found.
        remedy: What to do; empty when nothing is to be done.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was looked at.

    Attributes:
        device: The device found, or None when it cannot be used.
        checks: In reading order.
    """

    device: Device | None
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong for the device found."""
        return all(check.state != "fault" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """What `doctor --json` prints."""
        return {
            "healthy": self.healthy,
            "device": None if self.device is None else str(self.device),
            "checks": [{"name": c.name, "state": c.state, "found": c.found, "remedy": c.remedy} for c in self.checks],
        }


def diagnose(
    settings: Settings,
    specs: Sequence[KernelSpec],
    *,
    sources: Sources | None = None,
    inventory: Inventory | None = None,
    importer: Callable[[str], str | None] | None = None,
) -> Report:
    """Looks at the machine.

    Args:
        settings: Of the process.
        specs: Kernels whose libraries matter.
        sources: Where facts about devices come from; this machine when left out.
        inventory: What is installed; this machine's when left out.
        importer: Tries to import a module and gives the error's text or None.
    """
    from halocline.hal.gpu_libraries import read_torch_elsewhere

    sources = sources or Sources(torch=read_torch_elsewhere)
    build = sources.build()
    checks = [_torch_check(build)]
    device: Device | None = None
    try:
        findings = find_devices(settings, sources, build)
        checks.extend(_reading_check(finding, reading) for finding in findings for reading in finding.readings)
        device = probe(settings, sources=sources, load_torch=False)
        checks.append(_device_check(device, findings, build))
    except (DeviceError, SettingsError) as error:
        first, *rest = str(error).splitlines()
        checks.append(Check(name="device", state="fault", found=first, remedy="; ".join(line.strip() for line in rest)))
    inventory = installed_for(specs) if inventory is None else inventory
    checks.extend(library_checks(specs, device, inventory, importer or import_in_process))
    if device is not None:
        checks.append(coverage_check(specs, device, inventory))
    checks.extend(_folder_check(name, folder) for name, folder in _cache_folders(settings))
    return Report(device=device, checks=tuple(checks))


def library_checks(
    specs: Sequence[KernelSpec], device: Device | None, inventory: Inventory, importer: Callable[[str], str | None]
) -> list[Check]:
    """One check for each library that some kernel may use: installed, in range, sole owner, importable."""
    wanted: dict[Provider, set[str]] = {}
    for spec in specs:
        for provider in (*spec.providers, *spec.requires):
            wanted.setdefault(provider, set()).add(spec.vendor)
    present = sorted({p.module for p in wanted if inventory.find(p.distribution) or inventory.owners(p.module)})
    with ThreadPoolExecutor(max_workers=2) as pool:
        errors = dict(zip(present, pool.map(importer, present), strict=True))
    probed = Inventory(
        packages=inventory.packages, import_errors={module: error for module, error in errors.items() if error}
    )
    vendor = None if device is None else device.vendor
    return [
        _library_check(provider, probed, [p for p in wanted if p.module == provider.module], concerns=vendor in vendors)
        for provider, vendors in sorted(wanted.items(), key=lambda item: (item[0].module, item[0].distribution))
    ]


def coverage_check(specs: Sequence[KernelSpec], device: Device, inventory: Inventory) -> Check:
    """Whether every op has a kernel that is written, suits the device and finds its library."""
    missing = [
        op
        for op in sorted({spec.op for spec in specs})
        if not any(_can_serve(spec, device, inventory) for spec in specs if spec.op == op)
    ]
    if not missing:
        return Check(name="kernels", state="ok", found="every op has one for this device")
    return Check(
        name="kernels",
        state="fault",
        found=f"none for {len(missing)} ops: {', '.join(missing)}",
        remedy="halocline explain says why",
    )


def _can_serve(spec: KernelSpec, device: Device, inventory: Inventory) -> bool:
    if spec.vendor not in ("", device.vendor) or (spec.archs and device.arch not in spec.archs):
        return False
    if status_on(spec, device.arch) == "planned" or (spec.name == REFERENCE and device.is_gpu):
        return False
    found, _ = choose_provider(spec.providers, inventory)
    return (found is not None or not spec.providers) and all(not provider_problem(p, inventory) for p in spec.requires)


def import_in_process(module: str) -> str | None:
    """Imports a module in a process of its own; gives the last line of the error, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_IMPORT_SECONDS:.0f} seconds"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the process died with signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or ["no message"])[-1]


def _torch_check(build: TorchBuild | None) -> Check:
    if build is None:
        return Check(name="torch", state="fault", found="not installed", remedy="pip install torch")
    return Check(name="torch", state="ok", found=str(build))


def _reading_check(finding: Finding, reading: Reading) -> Check:
    name = f"{finding.vendor} devices by {reading.source}"
    if reading.problem is not None:
        return Check(name=name, state="remark", found=reading.problem, remedy="torch is asked instead")
    listed = ", ".join(f"{gpu.name} {gpu.arch}" for gpu in reading.gpus) or "none"
    driver = f"; driver {reading.driver}" if reading.driver else ""
    return Check(name=name, state="ok", found=f"{listed}{driver}")


def _device_check(device: Device, findings: Iterable[Finding], build: TorchBuild | None) -> Check:
    unused = [gpu for finding in findings for gpu in finding.visible] if not device.is_gpu else []
    if unused and build is not None:
        return Check(
            name="device",
            state="fault",
            found=f"{device}; {unused[0].name} is here, but {build} cannot drive it",
            remedy="install torch's build for it, or set HALOCLINE_DEVICE=cpu",
        )
    count = f", {device.num_devices} visible" if device.num_devices > 1 else ""
    return Check(name="device", state="ok", found=f"{device}{count}")


def _library_check(
    provider: Provider, inventory: Inventory, alternatives: Sequence[Provider], *, concerns: bool
) -> Check:
    """An absent library is a remark (another kernel may serve); a present one that cannot be used is a fault."""
    name = f"{provider.distribution} ({provider.module})"
    problem = provider_problem(provider, inventory, alternatives=alternatives)
    found = inventory.find(provider.distribution)
    if problem is None and found is not None:
        return Check(name=name, state="ok", found=f"{found.version}, in {provider.versions}, imports")
    what, _, remedy = (problem or "").removeprefix(f"package {provider.distribution} is ").partition("; ")
    return Check(name=name, state="fault" if concerns and found is not None else "remark", found=what, remedy=remedy)


def _cache_folders(settings: Settings) -> Iterable[tuple[str, Path]]:
    """Folders that compilers write to, each once."""
    home = Path(settings.foreign.get("HOME", "/"))
    if settings.cache_dir is not None:
        yield "HALOCLINE_CACHE_DIR", settings.cache_dir
    decided = settings.library_caches()
    for variable, default in (
        ("TRITON_CACHE_DIR", home / ".triton" / "cache"),
        ("DG_JIT_CACHE_DIR", home / ".deep_gemm"),
        ("FLASHINFER_WORKSPACE_BASE", home),
        ("TILELANG_CACHE_DIR", home / ".tilelang" / "cache"),
    ):
        yield variable, decided.get(variable, default)


def _folder_check(name: str, folder: Path) -> Check:
    """Whether a folder, or the nearest one above it that exists, can be written to."""
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check(name=f"cache folder {name}", state="ok", found=f"{folder} can be written")
    return Check(
        name=f"cache folder {name}",
        state="fault",
        found=f"{folder} cannot be written",
        remedy=f"set {name} to a folder that can",
    )
