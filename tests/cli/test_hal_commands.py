"""explain, doctor, kernels, compare, record and replay as a user meets them: text, JSON and exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset


def halocline(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALOCLINE_")}
    return subprocess.run(
        [sys.executable, "-m", "halocline", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**clean, "COLUMNS": "80", "OMP_NUM_THREADS": "1", **environment},
    )


def answer(*arguments: str, **environment: str) -> Any:
    done = halocline(*arguments, "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--device", "sm_90"),
        ("explain", "--device", "gfx942", "--op", "moe.experts"),
        ("kernels", "matrix"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_text_fits_80_columns_and_has_no_colour(arguments: tuple[str, ...]) -> None:
    done = halocline(*arguments)
    assert done.returncode == 0, done.stderr
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout, "nothing is cut off"


def test_an_explanation_reads_from_choice_to_reasons() -> None:
    text = halocline("explain", "--device", "gfx942", "--op", "hyper_connection.read").stdout
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "flash on amd gfx942 (MI300X), packages: recorded"
    assert lines[2].split()[:3] == ["hyper_connection.read", "triton", "device"]
    assert "hyper_connection.read (triton)" in lines
    flat = " ".join(text.split())
    assert "tilelang known_bad: known to be wrong on gfx942: threads are split at 32 of a 64-lane wave" in flat
    assert "(vllm-project/vllm#56342, vllm-project/vllm#45698)" in flat


def test_sources_are_shown() -> None:
    rows = {
        row["op"]: (row["chosen"], row["source"])
        for row in answer(
            "explain", "--device", "gfx942", "--kernel", "gemm.linear=triton",
            HALOCLINE_HIP_BACKEND="reference", HALOCLINE_KERNELS="norm.rms_norm=triton",
        )["ops"]
    }  # fmt: skip
    assert rows["gemm.linear"] == ("triton", "flag")
    assert rows["norm.rms_norm"] == ("triton", "env")
    assert rows["attention.sparse_decode"] == ("reference", "env")
    assert rows["moe.experts"] == ("triton", "device")


def test_the_variable_for_amd_says_when_it_has_no_effect() -> None:
    found = answer("explain", "--device", "sm_90", HALOCLINE_HIP_BACKEND="aiter")
    (note,) = found["notes"]
    assert note.startswith("HALOCLINE_HIP_BACKEND=aiter has no effect on nvidia sm_90 (H200)")
    text = halocline("explain", "--device", "sm_90", HALOCLINE_HIP_BACKEND="aiter").stdout
    assert "note: HALOCLINE_HIP_BACKEND=aiter has no effect" in text


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("explain", "--device", "gfx95"), {}, "unknown device 'gfx95'"),
        (("explain", "--model", "flush"), {}, "no such model: 'flush'"),
        (("explain", "--op", "moe.expert"), {}, "nearest  moe.experts"),
        (("explain", "--packages", "all"), {}, "recorded, local or none"),
        (("explain", "--device", "sm_90", "--tp", "3"), {}, "possible sizes: 1, 2, 4, 8"),
        (("explain", "--device", "gfx942"), {"HALOCLINE_HIP_BACKEND": "tilelangg"}, "nearest   tilelang"),
        (("explain",), {"HALOCLINE_KERNEL": "a=b"}, "nearest  HALOCLINE_KERNELS"),
        (
            ("explain", "--device", "gfx942"),
            {"HALOCLINE_HIP_BACKEND": "aiter"},
            "attention.*=aiter cannot be honoured for 'attention",
        ),
        (
            ("explain", "--device", "sm_90", "--kernel", "attention.sparse_decode=aiter"),
            {},
            "serves amd, the device is nvidia",
        ),
        (("compare", "--op", "norm.rms_nrm"), {}, "nearest  norm.rms_norm"),
        (("compare", "--op", "sampling.sample", "--first", "tritn"), {}, "nearest  triton"),
        (("replay", "/nowhere.safetensors"), {}, "cannot read the tensors of /nowhere.safetensors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_exits_with_2_and_one_clear_message(
    arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    done = halocline(*arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_list_and_the_matrix_agree_with_the_explanation() -> None:
    listed = answer("kernels", "list", "--op", "moe", "--device", "sm_90")["kernels"]
    assert {row["op"].partition(".")[0] for row in listed} == {"moe"}
    assert all(isinstance(row["rank"], int) for row in listed)
    cells = answer("kernels", "matrix")["ops"]["moe.experts"]
    assert set(cells) == {"cpu", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950", "gfx1201"}
    assert cells["sm_90"]["kernel"] == "triton_kernels"
    assert cells["gfx1201"]["kernel"] is None


def test_the_doctor_reports_a_healthy_cpu() -> None:
    report = answer("doctor")
    assert (report["healthy"], report["device"]) == (True, "cpu")
    assert {check["state"] for check in report["checks"]} <= {"ok", "remark"}


def test_the_doctor_exits_with_1_when_something_is_wrong(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = halocline("doctor", HALOCLINE_CACHE_DIR=str(blocked / "cache"))
    assert done.returncode == 1
    assert "FAULT" in done.stdout


def test_a_kernel_is_compared_with_itself_on_its_inputs() -> None:
    found = answer("compare", "--op", "sampling.sample", "--first", "reference")
    assert (found["first"], found["second"], found["device"]) == ("reference", "reference", "cpu")
    assert len(found["cases"]) >= 5
    assert all(output["within"] and output["max_abs"] == 0 for case in found["cases"] for output in case["outputs"])


def test_a_recording_is_played_back(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_checkpoint(model, preset("tiny"), seed=5)
    files = answer(
        "record", "--model", str(model), "--op", "attention.sparse_*", "--out", str(out), "--prompt", "Hello",
        "--max-new-tokens", "2",
    )["files"]  # fmt: skip
    assert files
    found = answer("replay", *files[:3])
    assert {call["op"] for call in found["calls"]} <= {"attention.sparse_decode", "attention.sparse_prefill"}
    assert all(output["within"] for call in found["calls"] for output in call["outputs"])
    text = halocline("replay", files[0]).stdout
    assert "within tolerance" in text
