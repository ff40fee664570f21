"""Lowered HIP source on a machine without an AMD GPU: emulated on the CPU by g++, compiled to machine code by clang.

`host/` holds the types and functions that the programs use, so that no vendor's header is needed. Emulation runs the
source, not the machine code: 64 lanes a wave, matrix instructions and exchanges as the architecture defines them.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

__all__ = ["code_object_facts", "emulated"]

HOST = Path(__file__).with_name("host")
HEADERS = ("hip_fp8", "gemm", "copy", "reduce", "scan", "ldsm", "threadblock_swizzle", "debug")
SHARED = "  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];"


def _include_folder(folder: Path) -> Path:
    """The headers that lowered source names; all but the first are empty."""
    (folder / "hip").mkdir(parents=True)
    (folder / "hip" / "hip_runtime.h").write_text('#include "device_types.h"\n')
    (folder / "tl_templates" / "hip").mkdir(parents=True)
    for name in HEADERS:
        (folder / "tl_templates" / "hip" / f"{name}.h").touch()
    return folder


def emulated(source: str, *, fnuz: bool) -> Callable[..., None]:
    """A function that runs a lowered program: `run(grid, name=tensor or number, ...)` by its parameters' names."""
    head = re.search(r'extern "C" __global__ void __launch_bounds__\((\d+)\) (\w+)\(([^)]*)\)', source)
    assert head is not None
    threads, kernel = int(head[1]), head[2]
    pairs = [parameter.replace("__restrict__", "").rsplit(" ", 1) for parameter in head[3].split(", ")]
    kinds, names = [pair[0].strip() for pair in pairs], [pair[1] for pair in pairs]
    parts = [source.replace(SHARED, "  uchar* buf_dyn_shmem = shared_memory;")]
    parts += [f"static {kind} given_{name};" for kind, name in zip(kinds, names, strict=True)]
    parts.append(f"static void entry() {{ {kernel}({', '.join(f'given_{name}' for name in names)}); }}")
    taken = ", ".join(f"{'void*' if '*' in kind else kind} {name}" for kind, name in zip(kinds, names, strict=True))
    kept = " ".join(f"given_{name} = ({kind}){name};" for kind, name in zip(kinds, names, strict=True))
    parts.append(
        f'extern "C" void run({taken}, int grid_x, int grid_y, int grid_z) {{\n'
        "  static uchar* memory = (uchar*)aligned_alloc(1024, 1 << 18);\n"
        f"  memset(memory, 0xff, 1 << 18);\n  shared_memory = memory; codes_are_fnuz = {str(fnuz).lower()};\n"
        f"  {kept}\n  waves::launch(entry, {threads}, {{grid_x, grid_y, grid_z}});\n}}\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = _include_folder(Path(name))
        (folder / "program.cpp").write_text("\n".join(parts))
        command = ["g++", "-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
        command += [f"-I{folder}", f"-I{HOST}", str(folder / "program.cpp"), "-o", str(folder / "program.so")]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(folder / "program.so"))
    scalars = {"int": ctypes.c_int, "float": ctypes.c_float}
    library.run.argtypes = [ctypes.c_void_p if "*" in kind else scalars[kind] for kind in kinds] + 3 * [ctypes.c_int]

    def run(grid: tuple[int, int, int], **arguments: Tensor | float) -> None:
        given = [arguments[name] for name in names]
        library.run(*(value.data_ptr() if isinstance(value, Tensor) else value for value in given), *grid)

    return run


def code_object_facts(source: str, *, clang: Path, arch: str) -> dict[str, int]:
    """Compiles lowered source to machine code; registers, spills and scratch, from the metadata behind the assembly."""
    with tempfile.TemporaryDirectory() as name:
        folder = _include_folder(Path(name))
        (folder / "program.hip").write_text(source)
        command = [str(clang), "-x", "hip", "-std=c++17", "-O3", "-w", "-S", "--offload-device-only", "-nogpulib"]
        command += ["-nogpuinc", "-nostdinc", f"--offload-arch={arch}", "-o", "-", f"-I{folder}", f"-I{HOST}"]
        ended = subprocess.run([*command, str(folder / "program.hip")], check=True, capture_output=True, text=True)
    found = {}
    for fact in ("vgpr_count", "agpr_count", "vgpr_spill_count", "private_segment_fixed_size", "wavefront_size"):
        line = re.search(rf"^[\s-]*\.{fact}:\s+(\d+)", ended.stdout, re.MULTILINE)
        assert line is not None, f"no {fact} behind the assembly"
        found[fact] = int(line[1])
    found["mfma"] = len(re.findall(r"^\s*v_mfma_", ended.stdout, re.MULTILINE))
    return found
