"""Launches that must not pass: each breaks one rule on gfx942, and the gates have to say which."""

from __future__ import annotations

import torch
from aot_archs import Arch
from aot_cases import BF16, F32, Case, empty
from aot_cases import CASES as SOUND_CASES

from halocline.kernels_portable import rms_norm
from halocline.kernels_portable.dense_gemm import dense_gemm
from halocline.kernels_portable.fp8_gemm import fp8_gemm
from halocline.kernels_portable.gemm_tiles import GemmTiles

TILES = GemmTiles(rows=32, columns=64, lanes=128, num_warps=4, num_stages=1)


def _spill(arch: Arch) -> None:
    """A row of 32768 lanes in one wave: 512 values a lane, as many as there are registers."""
    rms_norm._rms_norm_kernel[(8,)](
        empty(8, 32768), empty(32768), empty(8, 32768), 32768, 1e-6, WIDTH=32768, LANES=32768, num_warps=1
    )


def _ocp_codes(arch: Arch) -> None:
    """E4M3 of the other dialect: compiles by conversion to a wider type."""
    kind = torch.float8_e4m3fn if arch.dialect == "fnuz" else torch.float8_e4m3fnuz
    fp8_gemm(
        empty(32, 1024, dtype=kind), empty(32, 8, dtype=F32), empty(1, 1024, 1024, dtype=kind),
        empty(1, 8, 8, dtype=F32), out_dtype=BF16, tiles=TILES,
    )  # fmt: skip


def _shared_memory(arch: Arch) -> None:
    """Operands of 192 KiB in a pipeline."""
    tiles = GemmTiles(rows=128, columns=128, lanes=256, num_warps=8, num_stages=3)
    dense_gemm(empty(128, 4096), empty(1, 4096, 4096), out_dtype=BF16, tiles=tiles)


CASES: dict[str, Case] = {
    "spill": _spill,
    "ocp-codes": _ocp_codes,
    "shared-memory": _shared_memory,
    "sound": SOUND_CASES["linear-fp8-m32"],
}
