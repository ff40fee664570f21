"""Lowers every tilelang program for every architecture, and proves what can be proven of it without a device.

Run as a script in an environment that has tilelang (`./dev amd` makes one): what came out goes to
`tilelang_report.json`. tilelang is no dependency of the tests: they compare the report with the sources that it was
made from and with the rules of the architectures, so that a kernel cannot change without being lowered again.

- lowered: source text for gfx942, gfx950 and sm_90a, with threads, shared memory and matrix instructions.
- emulated: the HIP source, compiled by g++ for the CPU, gives right numbers in waves of 64 lanes.
- compiled: with `--clang`, the HIP source becomes gfx942 machine code (clang 19 knows no gfx950).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from host_runner import code_object_facts
from tilelang_cases import CASES
from tilelang_checks import EMULATED_ARCHS, MOST_ERROR, checks
from tilelang_sources import ARCHS, COMPILED_ARCHS, REPORT, source_digest

from halocline.kernels_portable.tilelang_program import lower

INSTRUCTIONS = re.compile(r"__builtin_amdgcn_(mfma_\w+)|tl::(wgmma_[rs]s)|tl::(mma_sync)\b")


def lowered_row(name: str, arch: str, keep: Path | None, clang: Path | None) -> dict[str, Any]:
    """Facts of one program on one architecture."""
    facts = ARCHS[arch]
    lowered = lower(CASES[name](facts.target, facts.fnuz), facts.compiler)
    if keep is not None:
        (keep / f"{name}-{arch}.cpp").write_text(lowered.source)
    counts = Counter(next(filter(None, found)) for found in INSTRUCTIONS.findall(lowered.source))
    row = {
        "kernel": name,
        "arch": arch,
        "threads": lowered.threads,
        "lds": lowered.shared_memory,
        "matrix": dict(sorted(counts.items())),
    }
    if clang is not None and arch in COMPILED_ARCHS:
        row["machine_code"] = code_object_facts(lowered.source, clang=clang, arch=arch)
    return row


def emulated_rows() -> list[dict[str, Any]]:
    """Errors of every check; the worst is one rounding of the result."""
    rows = []
    for arch in EMULATED_ARCHS:
        for check in checks():
            for what, dtype, error in check(arch):
                row = {"check": what, "arch": arch, "dtype": dtype, "error": float(f"{error:.1e}")}
                print(json.dumps(row), flush=True)
                assert error <= MOST_ERROR[dtype]
                rows.append(row)
    return rows


def main() -> int:
    """Lowers, emulates, compiles and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder for the sources that came out")
    parser.add_argument("--clang", type=Path, help="clang 19 with its AMDGPU target")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    emulated = emulated_rows()
    rows = [lowered_row(name, arch, options.keep, options.clang) for arch in ARCHS for name in CASES]
    report = {"tilelang": version("tilelang"), "sources": source_digest()}
    body = [f'"{key}": {json.dumps(value)}' for key, value in report.items()]
    for key, found in (("lowered", rows), ("emulated", emulated)):
        body.append(f'"{key}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in found) + "\n]")
    REPORT.write_text("{\n" + ",\n".join(body) + "\n}\n")
    print(f"{len(rows)} programs lowered, {len(emulated)} outputs emulated; {REPORT.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
