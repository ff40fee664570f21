"""docs/amd.md names what exists, and its tables leave no kernel and no op out."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from halocline.hal.ops import all_ops

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "amd.md").read_text()


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("amd_tables", ROOT / "docs" / "amd_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_op_stands_in_the_table(tables: ModuleType) -> None:
    assert set(tables.OP_KERNELS) == {op.name for op in all_ops()}
    assert all(f"| `{op.name}` |" in TEXT for op in all_ops())


def test_each_compiled_kernel_serves_an_op(tables: ModuleType) -> None:
    compiled = {row["kernel"] for row in json.loads(tables.ISA.read_text())}
    assert compiled == {kernel for kernels in tables.OP_KERNELS.values() for kernel in kernels}


def test_no_row_claims_amd_hardware() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `") and "test" not in line]
    assert rows
    assert {line.rstrip(" |").rpartition("| ")[2] for line in rows} == {"not run"}


def test_paths_and_commands_exist() -> None:
    paths = re.findall(r"`((?:tests|docs)/[\w./]+)`", TEXT)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    from halocline.cli import commands

    known = set(re.findall(r'"([a-z-]+)"', Path(str(sys.modules[commands.__name__].__file__)).read_text()))
    named = set(re.findall(r"(?:^    |`)halocline ([a-z-]+)", TEXT, re.MULTILINE))
    assert named - known == set()
