"""What the machine code of a compiled kernel says, and the rules that it must keep.

For waves of 64 lanes the facts come from the metadata behind the assembly, but for the shared memory: Triton's is
dynamic, and only its own metadata knows the size. For warps of 32 lanes they come from the compiler's own report.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from triton import knobs
from triton.compiler import CompiledKernel

__all__ = ["Isa", "IsaRules", "faults", "read_isa", "read_resource_usage"]


@dataclass(frozen=True, kw_only=True)
class Isa:
    """Facts of one kernel on one architecture.

    Attributes:
        vgpr: Vector registers, accumulators included.
        agpr: Accumulator registers among them.
        sgpr: Scalar registers.
        vgpr_spills: Vector registers that did not fit.
        sgpr_spills: Scalar registers that went into lanes of vector registers; harmless.
        scratch: Bytes of private memory.
        lds: Bytes of shared memory.
        wave_size: Lanes that run in step.
        mfma: Matrix instructions and how often each occurs.
        has_dot: Whether the program asks for matrix products.
        has_fp8_dot: Whether it asks for products of two FP8 operands.
    """

    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    wave_size: int
    mfma: dict[str, int]
    has_dot: bool
    has_fp8_dot: bool


@dataclass(frozen=True, kw_only=True)
class IsaRules:
    """What an architecture demands.

    Attributes:
        lds: Bytes of shared memory that there are.
        wave_size: Lanes that run in step.
        fp8_mfma: Part of the name of the instruction that multiplies FP8 operands as such; a conversion to a wider type
            compiles too, silently and at half the rate.
    """

    lds: int
    wave_size: int
    fp8_mfma: str


def read_isa(compiled: CompiledKernel) -> Isa:
    """Reads the facts of a kernel that was compiled to amdgcn."""
    text = compiled.asm["amdgcn"]

    def fact(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, f"no {name} behind the assembly"
        return int(found.group(1))

    dots = re.findall(r"tt\.dot(?:_scaled)? .*", compiled.asm["ttir"])
    mfma = Counter(re.findall(r"^\s*(v_mfma\w+)", text, re.MULTILINE))
    return Isa(
        vgpr=fact("vgpr_count"),
        agpr=fact("agpr_count"),
        sgpr=fact("sgpr_count"),
        vgpr_spills=fact("vgpr_spill_count"),
        sgpr_spills=fact("sgpr_spill_count"),
        scratch=fact("private_segment_fixed_size"),
        lds=int(compiled.metadata.shared),
        wave_size=fact("wavefront_size"),
        mfma=dict(sorted(mfma.items())),
        has_dot=bool(dots),
        has_fp8_dot=any(len(re.findall(r"f8E4M3", dot)) >= 2 for dot in dots),
    )


def faults(isa: Isa, rules: IsaRules) -> list[str]:
    """Every rule that a kernel breaks, one line each."""
    found = []
    if isa.vgpr_spills:
        found.append(f"{isa.vgpr_spills} vector registers are spilled")
    if isa.scratch:
        found.append(f"{isa.scratch} bytes of private memory are used")
    if isa.lds > rules.lds:
        found.append(f"{isa.lds} bytes of shared memory are needed, the device has {rules.lds}")
    if isa.wave_size != rules.wave_size:
        found.append(f"compiled for waves of {isa.wave_size} lanes, not {rules.wave_size}")
    if isa.has_dot and not isa.mfma:
        found.append("matrix products without a matrix instruction")
    if isa.has_fp8_dot and not all(rules.fp8_mfma in name for name in isa.mfma):
        found.append(f"FP8 products by {', '.join(isa.mfma)}, not by {rules.fp8_mfma}")
    return found


def read_resource_usage(compiled: CompiledKernel) -> dict[str, int]:
    """Registers, stack bytes (spills) and shared bytes of a kernel that was compiled to a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, f"no resource usage in {text!r}"
    return {"registers": int(found.group(1)), "stack": int(found.group(2)), "lds": int(compiled.metadata.shared)}
