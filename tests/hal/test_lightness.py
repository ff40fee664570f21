"""What commands load and cost, and that broken kernel packages disturb none of them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DENIED = (
    "sgl_kernel", "flash_mla", "flashinfer", "tilelang", "aiter", "triton", "deep_gemm", "cutlass", "flash_attn",
    "torch", "numpy",
)  # fmt: skip

COMMAND = """
import json, sys
from halocline.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("\\n" + json.dumps({"code": code, "modules": sorted(m for m in sys.modules)}))
"""
TREE = """
import importlib, json, pkgutil, sys
import halocline.hal
for found in pkgutil.walk_packages(halocline.hal.__path__, "halocline.hal."):
    importlib.import_module(found.name)
print(json.dumps({"code": 0, "modules": sorted(sys.modules)}))
"""


def python(code: str, *arguments: str, site: Path | None = None) -> tuple[int, set[str], str]:
    """Runs code in a fresh interpreter: the command's exit status, the modules that were loaded, the output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALOCLINE_")}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return int(found["code"] or 0), set(found["modules"]), done.stdout + done.stderr


def denied(modules: set[str]) -> set[str]:
    return {module for module in modules if module.partition(".")[0] in DENIED}


def test_no_module_of_the_hal_loads_a_library() -> None:
    _, modules, _ = python(TREE)
    assert "halocline.hal.selection" in modules
    assert denied(modules) == set()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("env",), 0),
        (("doctor", "--json"), 0),
        (("explain",), 0),
        (("explain", "--device", "gfx950", "--json"), 0),
        (("explain", "--device", "gfx951"), 2),
        (("explain", "--no-such-option"), 2),
        (("explain", "--kernel", "attention.sparse_decod=triton"), 2),
        (("kernels", "list"), 0),
        (("kernels", "matrix"), 0),
        (("no-such-command",), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_commands_load_neither_torch_nor_a_kernel_library(arguments: tuple[str, ...], code: int) -> None:
    found, modules, _ = python(COMMAND, *arguments)
    assert found == code
    assert denied(modules) == set()


@pytest.fixture
def broken_site(install: Callable[..., Path]) -> Path:
    """Kernel packages that abort, print or raise when they are imported."""
    install(
        "sglang-kernel", "0.4.5", {"sgl_kernel": "print('NOISE')\nraise ImportError('undefined symbol: _ZN5torch')"}
    )
    install("sgl-deep-gemm", "0.1.4.post1", {"deep_gemm": "import os\nprint('NOISE')\nos.abort()"})
    install("flashinfer-python", "0.6.15", {"flashinfer": "raise RuntimeError('no CUDA driver')"})
    return install("tilelang", "0.1.15", {"tilelang": "raise SystemExit('NOISE')"})


def test_broken_packages_do_not_disturb_an_explanation(broken_site: Path) -> None:
    """Explaining goes by metadata: it says that the version fits, and runs no code of the package."""
    arguments = ("explain", "--device", "sm_90", "--packages", "local", "--json")
    code, modules, output = python(COMMAND, *arguments, site=broken_site)
    assert code == 0
    assert denied(modules) == set()
    assert "NOISE" not in output
    rows = {row["op"]: row for row in json.loads(output[: output.rindex("\n\n{")])["ops"]}
    assert rows["attention.sparse_decode"]["chosen"] == "flashmla"


def test_the_doctor_names_each_broken_package_and_survives(broken_site: Path) -> None:
    code, modules, output = python(COMMAND, "doctor", "--json", site=broken_site)
    assert denied(modules) == set()
    report = json.loads(output[: output.rindex("\n\n{")])
    checks = {check["name"]: check for check in report["checks"]}
    assert "ImportError: undefined symbol: _ZN5torch" in checks["sglang-kernel (sgl_kernel)"]["found"]
    assert "died with signal 6" in checks["sgl-deep-gemm (deep_gemm)"]["found"]
    assert "RuntimeError: no CUDA driver" in checks["flashinfer-python (flashinfer)"]["found"]
    # This machine has no GPU: what is broken is worth a remark and no fault.
    assert (code, report["healthy"]) == (0, True)
    assert checks["sglang-kernel (sgl_kernel)"]["state"] == "remark"


# ---- budgets ----------------------------------------------------------------------------------------------------


def cpu_seconds(*command: str) -> float:
    """Processor time of a command: other work on the machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], capture_output=True, timeout=120, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_costs_little_more_than_the_libraries_that_print_it() -> None:
    pairs = [
        (cpu_seconds("-m", "halocline", "--help"), cpu_seconds("-c", "import typer, rich.table")) for _ in range(4)
    ]
    assert min(ours for ours, _ in pairs) <= 2.5 * min(theirs for _, theirs in pairs)


def test_an_explanation_takes_less_than_a_second_and_a_half() -> None:
    assert min(cpu_seconds("-m", "halocline", "explain", "--device", "gfx950") for _ in range(3)) < 1.5
