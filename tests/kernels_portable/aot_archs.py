"""The architectures that kernels are compiled for ahead of time, and what their machine code is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from isa import IsaRules
from triton.backends.compiler import GPUTarget

from halocline.kernels_portable.target import Target

Dialect = Literal["ocp", "fnuz"]


@dataclass(frozen=True, kw_only=True)
class Arch:
    """An architecture to compile for; the facts are those of `halocline.hal.device` and of the product's profile."""

    compiler: GPUTarget
    target: Target
    dialect: Dialect
    rules: IsaRules | None

    @property
    def serves_nvidia_libraries(self) -> bool:
        """Whether kernels that only feed NVIDIA's libraries are launched on it."""
        return self.compiler.backend == "cuda"

    @property
    def fp8(self) -> torch.dtype:
        """Element type of E4M3 tensors on it."""
        return torch.float8_e4m3fnuz if self.dialect == "fnuz" else torch.float8_e4m3fn


KIB = 1024
ARCHS = {
    "sm_90": Arch(
        compiler=GPUTarget("cuda", 90, 32),
        target=Target(shared_memory=227 * KIB, wave_size=32, num_processors=132),
        dialect="ocp",
        rules=None,
    ),
    "gfx942": Arch(
        compiler=GPUTarget("hip", "gfx942", 64),
        target=Target(shared_memory=64 * KIB, wave_size=64, num_processors=304),
        dialect="fnuz",
        rules=IsaRules(lds=64 * KIB, wave_size=64, fp8_mfma="fp8_fp8"),
    ),
    "gfx950": Arch(
        compiler=GPUTarget("hip", "gfx950", 64),
        target=Target(shared_memory=160 * KIB, wave_size=64, num_processors=256),
        dialect="ocp",
        rules=IsaRules(lds=160 * KIB, wave_size=64, fp8_mfma="f8f6f4"),
    ),
}
