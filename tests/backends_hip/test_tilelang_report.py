"""The recorded lowering of the tilelang programs: made from these sources, within each architecture's rules."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tilelang_sources import ARCHS, COMPILED_ARCHS, REPORT, source_digest

Row = dict[str, Any]
FOUND = json.loads(REPORT.read_text())
LOWERED: list[Row] = FOUND["lowered"]
EMULATED: list[Row] = FOUND["emulated"]
CASES = REPORT.with_name("tilelang_cases.py").read_text()
MATRIX = {"gfx942": "mfma_", "gfx950": "mfma_", "sm_90a": "mma"}
PRODUCTS = ("sparse_attention", "index_logits", "fp8_gemm", "mix_streams")


def test_the_report_was_made_from_these_sources() -> None:
    assert FOUND["sources"] == source_digest(), "a tilelang kernel changed: run ./dev amd"


def test_every_program_was_lowered_for_every_architecture() -> None:
    names = {row["kernel"] for row in LOWERED}
    families = set(re.findall(r'CASES\[f?"([a-z_0-9]+)', CASES))
    families |= {"sparse_attention", "combine_splits", "stream_coefficients", "site_input", "write_streams"}
    assert {name.partition("-")[0] for name in names} == families
    assert {(row["kernel"], row["arch"]) for row in LOWERED} == {(name, arch) for name in names for arch in ARCHS}


@pytest.mark.parametrize("row", LOWERED, ids=lambda row: f"{row['arch']}-{row['kernel']}")
def test_a_program_fits_its_architecture(row: Row) -> None:
    target = ARCHS[row["arch"]].target
    assert row["lds"] <= target.shared_memory
    assert row["threads"] % target.wave_size == 0
    assert row["threads"] <= 1024
    if row["kernel"].startswith(PRODUCTS):
        assert row["matrix"], "products without a matrix instruction"
        assert all(MATRIX[row["arch"]] in name for name in row["matrix"])
    if row["kernel"].startswith("fp8_gemm") and row["arch"] != "sm_90a":
        assert list(row["matrix"]) == ["mfma_f32_16x16x32_fp8_fp8"], "codes are multiplied as codes"


@pytest.mark.parametrize("arch", COMPILED_ARCHS)
def test_machine_code_neither_spills_nor_needs_scratch(arch: str) -> None:
    rows = [row for row in LOWERED if row["arch"] == arch]
    assert all("machine_code" in row for row in rows), "run ./dev amd with a clang 19"
    for row in rows:
        code = row["machine_code"]
        assert (code["vgpr_spill_count"], code["private_segment_fixed_size"], code["wavefront_size"]) == (0, 0, 64)
        assert code["vgpr_count"] <= 512
        assert bool(code["mfma"]) is row["kernel"].startswith(PRODUCTS)


@pytest.mark.parametrize("row", EMULATED, ids=lambda row: f"{row['arch']}-{row['check']}")
def test_the_lowered_source_is_right_in_waves_of_64_lanes(row: Row) -> None:
    """Emulated on a CPU; a split of threads at 32 lanes would be off by far more (vllm-project/vllm#56342)."""
    assert row["error"] <= {"bfloat16": 4e-3, "float32": 1e-5}[row["dtype"]]


def test_every_kind_of_program_was_emulated_on_both_architectures() -> None:
    kinds = {"sparse_attention", "index_logits", "fp8_gemm", "mix_streams", "stream_coefficients", "site_input"}
    found = {(row["check"].partition(" ")[0], row["arch"]) for row in EMULATED}
    assert found == {(kind, arch) for kind in {*kinds, "write_streams"} for arch in ("gfx942", "gfx950")}
