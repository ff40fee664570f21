"""What the report of lowered tilelang programs was made from, and for which architectures. Needs no tilelang."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from halocline.hal.device import ARCHS as FACTS
from halocline.kernels_portable.target import Target

__all__ = ["ARCHS", "COMPILED_ARCHS", "REPORT", "LoweringArch", "source_digest"]

ROOT = Path(__file__).resolve().parents[2]
REPORT = Path(__file__).with_name("tilelang_report.json")


@dataclass(frozen=True, kw_only=True)
class LoweringArch:
    """An architecture as tilelang names it, with the facts on which programs depend."""

    compiler: dict[str, str]
    target: Target
    fnuz: bool


def _arch(name: str, compiler: dict[str, str], num_processors: int) -> LoweringArch:
    facts = FACTS[name]
    target = Target(shared_memory=facts.shared_memory, wave_size=facts.wave_size, num_processors=num_processors)
    return LoweringArch(compiler=compiler, target=target, fnuz=facts.fp8_dialect == "fnuz")


ARCHS = {
    "gfx942": _arch("gfx942", {"kind": "hip", "mcpu": "gfx942"}, 304),
    "gfx950": _arch("gfx950", {"kind": "hip", "mcpu": "gfx950"}, 256),
    "sm_90a": _arch("sm_90", {"kind": "cuda", "arch": "sm_90a"}, 132),
}

COMPILED_ARCHS = ("gfx942",)  # clang 19 of Debian knows no gfx950


def source_digest() -> str:
    """Changes when a tilelang kernel or the list of cases does."""
    paths = [*sorted((ROOT / "kernels_portable").glob("tilelang_*.py")), Path(__file__).with_name("tilelang_cases.py")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()
