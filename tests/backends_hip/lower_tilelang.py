"""Lowers every tilelang program for every architecture and writes what came out to `tilelang_report.json`.

Run as a script in an environment that has tilelang: `python lower_tilelang.py [--keep FOLDER]`; no device is needed.
tilelang is no dependency of the tests: they compare the report with the sources that it was made from, and with the
rules of the architectures, so that a kernel cannot change without being lowered again.
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

from tilelang_sources import ARCHS, REPORT, source_digest


def lowered_row(name: str, arch: str, keep: Path | None) -> dict[str, Any]:
    """Facts of one program on one architecture."""
    from tilelang_cases import CASES

    from halocline.kernels_portable.tilelang_program import lower

    facts = ARCHS[arch]
    lowered = lower(CASES[name](facts.target, facts.fnuz), facts.compiler)
    if keep is not None:
        (keep / f"{name}-{arch}.cpp").write_text(lowered.source)
    instructions = re.findall(r"__builtin_amdgcn_(mfma_\w+)|tl::(wgmma_[rs]s)|tl::(mma_sync)\b", lowered.source)
    counts = Counter(next(filter(None, found)) for found in instructions)
    return {
        "kernel": name,
        "arch": arch,
        "threads": lowered.threads,
        "lds": lowered.shared_memory,
        "matrix": dict(sorted(counts.items())),
    }


def main() -> int:
    """Lowers all and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="folder for the sources that came out")
    keep = parser.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    from tilelang_cases import CASES

    rows = [lowered_row(name, arch, keep) for arch in ARCHS for name in CASES]
    head = {"tilelang": version("tilelang"), "sources": source_digest()}
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    REPORT.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{body}\n]}}\n')
    print(f"{len(rows)} programs lowered; {REPORT.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
