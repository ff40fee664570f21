"""What people install holds the whole package and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"training"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the tracked files so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listing.split("\0")):
        path, copy = ROOT / name, source / name
        if path.is_symlink() or path.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path.readlink()) if path.is_symlink() else copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", target, source], check=True, capture_output=True)
    return zipfile.ZipFile(next(target.glob("halocline-*.whl")))


def _code_files() -> set[str]:
    folders = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in LEFT_OUT]
    return {f"halocline/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.py")}


def test_wheel_holds_every_python_file_of_the_code_folders_and_no_other(wheel: zipfile.ZipFile) -> None:
    found = {name for name in wheel.namelist() if name.endswith(".py")}
    assert found == _code_files() | {"halocline/__init__.py", "halocline/__main__.py"}


def test_wheel_is_marked_as_typed_and_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "halocline/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_has_one_top_level_package(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name} == {"halocline"}


def test_base_dependencies_name_no_vendor_kernel_and_pin_the_prompt_encoder(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    rows = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    base = {row.split(";")[0].strip() for row in rows if "extra ==" not in row}
    names = {row.split("=")[0].split(">")[0] for row in base}
    assert "deepseek-recipe==0.2.0" in base
    vendor = {"aiter", "amd-aiter", "flashinfer-python", "sglang-kernel", "sgl-deep-gemm", "tilelang", "triton"}
    assert names & vendor == set()
