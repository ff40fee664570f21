"""`halocline doctor --image`: the same verdicts as `pip check` where both look, and an exit status for builds."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from halocline.cli.image_checks import Constraints, Installed, compiler_version, find_conflicts, installed_here
from halocline.cli.main import main
from halocline.hal.errors import SettingsError


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages folder of an empty environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    return next(folder.glob("lib/python*/site-packages"))


def _install(site: Path, name: str, version: str, *requires: str, modules: tuple[str, ...] = ()) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    rows = "".join(f"Requires-Dist: {row}\n" for row in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{rows}")
    (info / "RECORD").write_text("".join(f"{module}/__init__.py,,\n" for module in modules))


def _pip_check(site: Path) -> set[tuple[str, str]]:
    """What pip says of the environment, as (package, requirement)."""
    command = [sys.executable, "-m", "pip", "--python", str(site.parents[2]), "check"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    wrong = re.findall(r"^(\S+) \S+ has requirement (\S+?)[,;]", text + "\n", re.MULTILINE)
    wrong += re.findall(r"^(\S+) \S+ has requirement (\S+), but", text, re.MULTILINE)
    missing = re.findall(r"^(\S+) \S+ requires ([\w.-]+), which is not installed", text, re.MULTILINE)
    return {(name, re.split(r"[<>=!~]", requirement)[0]) for name, requirement in [*wrong, *missing]}


def test_conflicts_are_those_of_pip_check(site: Path) -> None:
    _install(site, "deep-gemm-like", "0.1.4", "tvm-ffi-like==0.1.11")
    _install(site, "tilelang-like", "0.1.15", "tvm-ffi-like>=0.1.11,<0.1.13", 'winlib; sys_platform == "win32"')
    _install(site, "flashinfer-like", "0.6.15", "tvm-ffi-like<0.2", "absent-library", 'dev-tool; extra == "dev"')
    _install(site, "tvm-ffi-like", "0.1.13")
    installed = installed_here([str(site)])
    found = {(c.name, re.split(r"[<>=!~]", c.requirement)[0]) for c in find_conflicts(installed, _names(installed))}
    assert found == {
        ("deep-gemm-like", "tvm-ffi-like"),
        ("tilelang-like", "tvm-ffi-like"),
        ("flashinfer-like", "absent-library"),
    }
    assert found == _pip_check(site)


def _names(installed: list[Installed]) -> list[str]:
    return [package.name for package in installed]


def test_modules_are_read_from_the_list_of_files(site: Path) -> None:
    _install(site, "owner-of-two", "1.0", modules=("first", "second"))
    modules = {package.name: package.modules for package in installed_here([str(site)])}
    assert modules["owner-of-two"] == ("first", "second")


def test_what_the_roots_do_not_reach_is_not_looked_at() -> None:
    broken = Installed(name="other-engine", version="1", requires=("numpy<1",))
    fine = Installed(name="halocline", version="1", requires=("numpy>=2",))
    numpy = Installed(name="numpy", version="2.4.6")
    assert find_conflicts([broken, fine, numpy], ["halocline"]) == []
    assert len(find_conflicts([broken, fine, numpy], ["other-engine"])) == 1


def test_extras_are_followed_where_they_are_asked_for() -> None:
    user = Installed(name="user", version="1", requires=("kit[blas]==13",))
    kit = Installed(name="kit", version="13", requires=('blas==2; extra == "blas"', 'fft==2; extra == "fft"'))
    conflicts = find_conflicts([user, kit], ["kit", "user"])
    assert [str(conflict) for conflict in conflicts] == ["kit requires blas==2, nothing is installed"]


def test_a_missing_dependency_of_what_is_given_is_no_conflict_but_a_wrong_one_is() -> None:
    given = Installed(name="given", version="1", requires=("pandas", "numpy<2"))
    numpy = Installed(name="numpy", version="2.4.6")
    conflicts = find_conflicts([given, numpy], ["given"], given=["given"])
    assert [conflict.requirement for conflict in conflicts] == ["numpy<2"]


def test_constraints_hold_pins_and_accepted_conflicts_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    file.write_text("# why\n# conflict: Flash_MLA requires torch>=2.14.1: stable ABI: works\nTorch==2.11.0\n")
    read = Constraints.read([file])
    assert read.pins == {"torch": "2.11.0"}
    assert read.accepted == {("flash-mla", "torch>=2.14.1"): "stable ABI: works"}
    file.write_text("torch>=2.11\n")
    with pytest.raises(SettingsError, match=r"set.txt:1 is no pin"):
        Constraints.read([file])


def test_compiler_versions_are_read_from_the_files_of_the_tool_kits(tmp_path: Path) -> None:
    assert compiler_version("nvidia", tmp_path) is compiler_version("amd", tmp_path) is None
    for file, text in {
        "usr/local/cuda/version.json": json.dumps({"cuda_nvcc": {"name": "CUDA NVCC", "version": "13.0.88"}}),
        "opt/rocm/.info/version": "7.2.3-81\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    assert (compiler_version("nvidia", tmp_path), compiler_version("amd", tmp_path)) == ("13.0.88", "7.2.3-81")


# ---- the command ------------------------------------------------------------------------------------------------


def _doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    printed = capsys.readouterr()
    return stopped.value.code or 0, " ".join((printed.out + printed.err).split())


def test_command_passes_here_with_what_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "image.txt"
    file.write_text(f"torch=={importlib.metadata.version('torch')}\nnot-installed==1.0\n")
    status, output = _doctor(capsys, "--image", "--constraints", str(file), "--json")
    report = json.loads(output)
    assert (status, report["healthy"]) == (0, True)
    assert {
        "name": "pins",
        "state": "ok",
        "found": "1 of 2 recorded versions are here, none was swapped",
        "remedy": "",
    } in report["checks"]


def test_command_fails_when_torch_was_swapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "image.txt"
    file.write_text("torch==1.0\n")
    status, output = _doctor(capsys, "--image", "--constraints", str(file))
    assert status == 1
    assert "1.0 was recorded: it was swapped" in output


def test_constraints_without_image_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = _doctor(capsys, "--constraints", str(tmp_path / "image.txt"))
    assert status == 2
    assert "--image" in output
