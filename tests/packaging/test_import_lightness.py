"""Start-up is part of the product: what a fresh interpreter loads, measured in one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch", "numpy", "triton", "safetensors", "tokenizers", "transformers", "deepseek_recipe", "starlette", "uvicorn",
    "llguidance", "sgl_kernel", "flash_mla", "flashinfer", "deep_gemm", "tilelang", "aiter", "cutlass", "flash_attn",
}  # fmt: skip
MOST_MODULES_FOR_HELP = 230

RUN_CLI = """
import sys
from halocline.cli.main import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert not stop.code, f"exit status {{stop.code}}"
"""


def loaded(code: str) -> set[str]:
    """The names in sys.modules of a fresh interpreter after it ran some code."""
    program = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def top_level(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_hal_loads_the_standard_library_only() -> None:
    fresh = top_level(loaded("pass") | loaded("import json"))
    extra = top_level(loaded("import halocline.hal")) - fresh - set(sys.stdlib_module_names)
    assert extra == {"halocline"}


def test_the_measurement_sees_a_heavy_module() -> None:
    assert "numpy" in top_level(loaded("import numpy")) & HEAVY


def test_importing_halocline_loads_one_module_of_ours() -> None:
    modules = loaded("import halocline")
    assert top_level(modules) & HEAVY == set()
    assert {name for name in modules if name.startswith("halocline")} == {"halocline"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["env"], ["env", "--json"]], ids=" ".join)
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    assert top_level(loaded(RUN_CLI.format(arguments=arguments))) & HEAVY == set()


def test_plan_weights_loads_nothing_heavy(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    write = (
        "import json, pathlib\n"
        "from halocline.models.deepseek_v4 import config_writer, presets\n"
        f"pathlib.Path({str(config)!r}).write_text(json.dumps(config_writer.to_release(presets.preset('tiny'))))"
    )
    assert top_level(loaded(write)) & HEAVY == set()
    assert top_level(loaded(RUN_CLI.format(arguments=["plan-weights", str(config), "--json"]))) & HEAVY == set()


def test_help_stays_within_its_module_budget() -> None:
    modules = loaded(RUN_CLI.format(arguments=["--help"]))
    assert len(modules) <= MOST_MODULES_FOR_HELP
    assert {name for name in modules if name.startswith("halocline.cli.")} == {
        "halocline.cli.commands", "halocline.cli.lazy", "halocline.cli.main",
    }  # fmt: skip
