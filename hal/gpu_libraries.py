"""Devices as the vendors' management libraries and torch report them. No GPU context is created by the former.

Each reader takes the library as an argument, so that tests can hand in a fake, and gives a `Reading`: what is there,
or why it cannot tell.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from halocline.hal.device import Gpu, Reading

__all__ = ["read_amdsmi", "read_nvml", "read_torch", "read_torch_elsewhere"]

_TORCH_SCRIPT = (
    "from halocline.hal import gpu_libraries as g; import dataclasses, json; "
    "print(json.dumps(dataclasses.asdict(g.read_torch())))"
)


def read_nvml(load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> Reading:
    """Reads NVIDIA devices through NVML, in PCI bus order."""
    try:
        nvml = load()
        nvml.nvmlInit()
    except Exception as error:  # absent, broken or refused: the library's own error types live in the library
        return Reading(source="nvml", problem=_one_line(error))
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        gpus = tuple(_nvml_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except Exception as error:  # see above
        return Reading(source="nvml", problem=_one_line(error))
    finally:
        nvml.nvmlShutdown()
    return Reading(source="nvml", gpus=gpus, driver=driver)


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    arch, name = f"sm_{major}{minor}", _text(nvml.nvmlDeviceGetName(handle))
    parts: list[Gpu] = []
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        current = 0
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:
            continue  # partitions are numbered with holes
        parts.append(
            Gpu(
                uuid=_text(nvml.nvmlDeviceGetUUID(part)),
                name=f"{name} MIG",
                arch=arch,
                memory=int(nvml.nvmlDeviceGetMemoryInfo(part).total),
            )
        )
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(uuid=_text(nvml.nvmlDeviceGetUUID(handle)), name=name, arch=arch, memory=memory, parts=tuple(parts))


def read_amdsmi(load: Callable[[], Any] = lambda: importlib.import_module("amdsmi")) -> Reading:
    """Reads AMD devices through amdsmi."""
    try:
        smi = load()
        smi.amdsmi_init()
    except Exception as error:  # absent, broken or refused: the library's own error types live in the library
        return Reading(source="amdsmi", problem=_one_line(error))
    try:
        gpus = tuple(_amdsmi_gpu(smi, handle) for handle in smi.amdsmi_get_processor_handles())
    except Exception as error:  # see above
        return Reading(source="amdsmi", problem=_one_line(error))
    finally:
        smi.amdsmi_shut_down()
    return Reading(source="amdsmi", gpus=gpus)


def _amdsmi_gpu(smi: Any, handle: Any) -> Gpu:
    asic = smi.amdsmi_get_gpu_asic_info(handle)
    vram = smi.amdsmi_get_gpu_vram_info(handle)
    version = str(asic["target_graphics_version"])
    return Gpu(
        uuid=_amd_uuid(str(smi.amdsmi_get_gpu_device_uuid(handle))),
        name=str(asic["market_name"]),
        arch=version if version.startswith("gfx") else f"gfx{version}",
        memory=int(vram["vram_size"]) * 1024 * 1024,
    )


def _amd_uuid(text: str) -> str:
    return text if text.startswith("GPU-") else f"GPU-{text}"


def read_torch() -> Reading:
    """Reads the devices that torch sees, in this process. Creates a context; visibility is already applied."""
    import torch

    try:
        if not torch.cuda.is_available():
            return Reading(source="torch", problem="torch sees no accelerator", applied=True)
        rocm = torch.version.hip is not None
        cuda: Any = torch.cuda
        gpus = tuple(_torch_gpu(cuda.get_device_properties(n), rocm) for n in range(torch.cuda.device_count()))
    except RuntimeError as error:
        return Reading(source="torch", problem=_one_line(error), applied=True)
    return Reading(source="torch", gpus=gpus, driver="", applied=True)


def _torch_gpu(properties: Any, rocm: bool) -> Gpu:
    arch = str(properties.gcnArchName).split(":", 1)[0] if rocm else f"sm_{properties.major}{properties.minor}"
    return Gpu(
        uuid=str(getattr(properties, "uuid", "")), name=properties.name, arch=arch, memory=properties.total_memory
    )


def read_torch_elsewhere(timeout: float = 120.0) -> Reading:
    """As `read_torch`, in a process of its own: for commands that must not load torch."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_SCRIPT], capture_output=True, text=True, timeout=timeout, check=True
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        return Reading(source="torch", problem=_one_line(error), applied=True)
    gpus = tuple(Gpu(uuid=g["uuid"], name=g["name"], arch=g["arch"], memory=g["memory"]) for g in found["gpus"])
    return Reading(source="torch", gpus=gpus, driver=found["driver"], problem=found["problem"], applied=True)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
