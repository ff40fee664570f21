"""Folders, links, tool settings and linter contracts describe the same repository."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ROOT / "src" / "halocline"
CODE_FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
NOT_IN_THE_WHEEL = {"training"}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", ["hal", "backends_cuda", "backends_hip", "models"])
def test_the_fixed_folders_are_code_folders(folder: str) -> None:
    assert folder in CODE_FOLDERS


@pytest.mark.parametrize("folder", ["docker", "tests"])
def test_folders_that_are_no_packages_have_no_init(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_each_code_folder_has_one_relative_link_and_nothing_else_is_linked() -> None:
    links = {path.name: os.readlink(path) for path in LINKS.iterdir() if path.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in CODE_FOLDERS}


def test_the_import_package_holds_only_its_own_files_beside_the_links() -> None:
    own = {path.name for path in LINKS.iterdir() if not path.is_symlink()} - {"__pycache__"}
    assert own == {"__init__.py", "__main__.py", "py.typed"}


def test_every_folder_with_python_below_a_code_folder_is_a_package() -> None:
    folders = {path.parent for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_wheel_leaves_out_only_what_is_said_to_be_left_out(pyproject: dict[str, Any]) -> None:
    find = pyproject["tool"]["setuptools"]["packages"]["find"]
    assert find["where"] == ["src"]
    assert find["exclude"] == [f"halocline.{folder}*" for folder in sorted(NOT_IN_THE_WHEEL)]


def test_pyright_is_strict_and_includes_hal_by_its_link(pyproject: dict[str, Any]) -> None:
    """pyright does not walk into links from a parent folder, so a parent here would check nothing."""
    pyright = pyproject["tool"]["pyright"]
    assert (pyright["include"], pyright["typeCheckingMode"]) == (["src/halocline/hal"], "strict")
    assert all((ROOT / path).is_symlink() for path in pyright["include"])


def _modules(contract: dict[str, Any]) -> set[str]:
    keys = ("layers", "modules", "source_modules", "forbidden_modules")
    names = {name for key in keys for name in contract.get(key, [])}
    return {name.removeprefix("halocline.") for name in names if name.startswith("halocline.")}


def _forbidden_pairs(contracts: list[dict[str, Any]]) -> set[tuple[str, str]]:
    pairs = set()
    for contract in contracts:
        rows = [[name.removeprefix("halocline.") for name in contract.get(key, [])] for key in ("layers", "modules")]
        layers, modules = rows
        pairs |= {(low, high) for index, high in enumerate(layers) for low in layers[index + 1 :]}
        pairs |= {(one, other) for one in modules for other in modules if one != other}
        pairs |= {
            (source.removeprefix("halocline."), target.removeprefix("halocline."))
            for source in contract.get("source_modules", [])
            for target in contract.get("forbidden_modules", [])
        }
    return pairs


def test_linter_contracts_name_existing_folders_and_miss_none(pyproject: dict[str, Any]) -> None:
    named = set().union(*(_modules(contract) for contract in pyproject["tool"]["importlinter"]["contracts"]))
    assert named == set(CODE_FOLDERS)


ABOVE = ["models", "engine", "serving", "cli"]
BACKENDS = ["backends_reference", "backends_cuda", "backends_hip"]
# The table of who may import whom, written out once more: source, then what it must not import.
MUST_NOT = {
    "hal": [*BACKENDS, "backends_triton", "kernels_portable", *ABOVE, "benchmarks", "training", "numpy", "triton"],
    "kernels_portable": ["hal", *BACKENDS, "backends_triton", "models", "engine", "serving", "cli"],
    "backends_triton": [*BACKENDS, "models", "engine", "serving", "cli", "sgl_kernel", "aiter"],
    "backends_reference": ["backends_cuda", "backends_hip", "backends_triton", "kernels_portable", "models", "engine"],
    "backends_cuda": ["backends_reference", "backends_hip", "models", "engine", "aiter", "amdsmi"],
    "backends_hip": ["backends_reference", "backends_cuda", "models", "engine", "sgl_kernel", "flashinfer", "pynvml"],
    "models": [*BACKENDS, "backends_triton", "kernels_portable", "engine", "serving", "cli", "triton", "tilelang"],
    "engine": [*BACKENDS, "kernels_portable", "serving", "cli", "triton", "aiter", "deep_gemm"],
    "serving": [*BACKENDS, "kernels_portable", "models", "cli", "sgl_kernel"],
    "cli": [*BACKENDS, "kernels_portable", "flashinfer", "aiter"],
}


@pytest.mark.parametrize("source", MUST_NOT)
def test_linter_contracts_forbid_what_the_table_forbids(source: str, pyproject: dict[str, Any]) -> None:
    pairs = _forbidden_pairs(pyproject["tool"]["importlinter"]["contracts"])
    assert [target for target in MUST_NOT[source] if (source, target) not in pairs] == []


def test_no_contract_has_an_exception(pyproject: dict[str, Any]) -> None:
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    assert [contract["name"] for contract in contracts if contract.get("ignore_imports")] == []


def test_each_backend_is_an_entry_point_to_its_manifest(pyproject: dict[str, Any]) -> None:
    group = pyproject["project"]["entry-points"]["halocline.backends"]
    expected = {name.removeprefix("backends_"): f"halocline.{name}.manifest:MANIFEST" for name in BACKENDS}
    assert group == expected
