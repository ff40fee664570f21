"""Compiles FlashInfer modules into the folder from which it loads them without a compiler: `... norm mhc topk`.

A name is that of a function `gen_NAME_module` in `flashinfer.jit.NAME`. The architectures come from
FLASHINFER_CUDA_ARCH_LIST, the scratch folder from FLASHINFER_WORKSPACE_BASE; no GPU is needed. Written against
flashinfer 0.6.15, whose top-k takes minutes on two cores: one long translation unit.
"""

from __future__ import annotations

import shutil
import sys
import time
from importlib import import_module


def main(names: list[str]) -> int:
    """Builds each module and moves it to its place; ends with what FlashInfer itself then thinks of it."""
    for name in names:
        start = time.monotonic()
        spec = getattr(import_module(f"flashinfer.jit.{name}"), f"gen_{name}_module")()
        spec.build(verbose=False)
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, spec.aot_path)
        if not spec.is_aot:
            sys.exit(f"prebuild_flashinfer: {name} was built, but flashinfer does not look for it at {spec.aot_path}")
        print(f"{spec.aot_path}: {spec.aot_path.stat().st_size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
