"""What people install holds the whole package and nothing else."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"training"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, so that building leaves the checkout clean."""
    copy = tmp_path_factory.mktemp("source")
    for name in _tracked():
        path = ROOT / name
        if path.is_symlink() or path.is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).symlink_to(path.readlink()) if path.is_symlink() else (copy / name).write_bytes(
                path.read_bytes()
            )
    return copy


def _tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listing.split("\0") if name]


def _build_wheel(source: Path, target: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", target, source], check=True, capture_output=True)
    return zipfile.ZipFile(next(target.glob("halocline-*.whl")))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that is built from the sources."""
    return _build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    target = tmp_path_factory.mktemp("sdist")
    code = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, target], cwd=source, check=True, capture_output=True)
    with tarfile.open(next(target.glob("halocline-*.tar.gz"))) as archive:
        archive.extractall(target, filter="data")
    return next(path for path in target.iterdir() if path.is_dir())


def _code_files() -> set[str]:
    folders = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in LEFT_OUT]
    return {f"halocline/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.py")}


def test_wheel_holds_every_python_file_of_the_code_folders_and_no_other(wheel: zipfile.ZipFile) -> None:
    found = {name for name in wheel.namelist() if name.endswith(".py")}
    assert found == _code_files() | {"halocline/__init__.py", "halocline/__main__.py"}


def test_wheel_is_under_a_megabyte_and_has_no_model(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).stat().st_size < 1_000_000
    assert [name for name in wheel.namelist() if name.endswith((".safetensors", ".jsonl"))] == []


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


def test_wheel_holds_every_other_file_of_the_code_folders(wheel: zipfile.ZipFile) -> None:
    """Pages, styles and tables beside the code; what is read at run time must be there."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - LEFT_OUT
    others = {name for name in _tracked() if name.split("/")[0] in folders and not name.endswith((".py", ".md"))}
    assert {f"halocline/{name}" for name in others} - set(wheel.namelist()) == set()


def test_sdist_has_no_link_and_gives_the_same_wheel(
    sdist: Path, wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert [path for path in sdist.rglob("*") if path.is_symlink()] == []
    again = _build_wheel(sdist, tmp_path_factory.mktemp("again"))
    record = next(name for name in wheel.namelist() if name.endswith("/RECORD"))
    files = [{name: archive.read(name) for name in archive.namelist() if name != record} for archive in (wheel, again)]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []


def test_entry_points_are_the_command_and_the_backends(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(next(name for name in wheel.namelist() if name.endswith("/entry_points.txt"))).decode()
    found = configparser.ConfigParser()
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(text)
    assert dict(found["console_scripts"]) == {"halocline": "halocline.cli.main:main"}
    assert set(found["halocline.backends"]) == {"reference", "cuda", "hip"}


def test_extras_are_the_four_that_are_documented(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    extras = [row.removeprefix("Provides-Extra: ") for row in metadata.splitlines() if "Provides-Extra" in row]
    assert sorted(extras) == ["bench", "cuda", "dev", "rocm"]
    assert "Requires-Python: >=3.11" in metadata


def test_version_of_the_wheel_is_that_of_the_package_and_of_the_newest_change(wheel: zipfile.ZipFile) -> None:
    from halocline import __version__

    assert f"-{__version__}-py3-none-any.whl" in str(wheel.filename)
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.split()[1] == __version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
