"""Kernels and wrappers for both vendors hold nothing that only one vendor's compiler or hardware knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "kernels_portable").glob("*.py"), *(ROOT / "backends_triton").glob("*.py")])

# What must not stand in a source, and the public thread or the rule behind it.
FORBIDDEN = {
    "another vendor's library functions": re.compile(r"tl\.extra|libdevice|tl\.inline_asm|\.ptx\b|\basm volatile\b"),
    "programmatic dependent launch (vllm-project/vllm#42876)": re.compile(r"launch_pdl|gdc_\w+|griddep"),
    "shuffles with a 32-bit mask (sgl-project/sglang#27197)": re.compile(r"__shfl\w*_sync|shfl\w*\(\s*0x"),
    "threads counted as warps of 32 (vllm-project/vllm#56342)": re.compile(
        r"num_warps\s*\*\s*32|32\s*\*\s*num_warps|(?:tid|lane_id|get_thread_binding\(\))\s*(?:<|>=|//|%)\s*32\b"
    ),
    "one FP8 type taken for all (ROCm/ATOM#1793)": re.compile(r"dtype\s*(?:==|!=|is)\s*torch\.float8"),
}  # fmt: skip


def faults(text: str) -> list[str]:
    return [f"{what}: {found.group()}" for what, pattern in FORBIDDEN.items() for found in pattern.finditer(text)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_source_is_good_for_both_vendors(source: Path) -> None:
    assert faults(source.read_text()) == []


@pytest.mark.parametrize(
    "planted",
    [
        "x = tl.extra.cuda.libdevice.exp(x)",
        "kernel[grid](x, launch_pdl=True)",
        "v = __shfl_xor_sync(0xFFFFFFFF, v, 1)",
        "lanes = num_warps * 32",
        "if tid < 32:",
        "half = T.get_thread_binding() // 32",
        "if x.dtype == torch.float8_e4m3fn:",
    ],
)
def test_a_planted_fault_is_found(planted: str) -> None:
    assert faults(planted)
