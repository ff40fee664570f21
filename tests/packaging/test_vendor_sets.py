"""The recorded package sets of the two vendors: consistent but for the conflicts that the constraints name."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from halocline.cli.image_checks import Constraints, Installed, find_conflicts, image_checks
from halocline.hal.backend import load_manifests, specs_of
from halocline.hal.device import TorchBuild
from halocline.hal.inventory import canonical_name

ROOT = Path(__file__).resolve().parents[2]
SETS = ["cuda", "rocm"]
# What markers see on the machine that a set is for.
TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.13",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
    "sys_platform": "linux",
}
BUILDS = {
    "cuda": (TorchBuild(version="2.11.0+cu130", vendor="nvidia", toolkit="13.0"), "13.0.88"),
    "rocm": (TorchBuild(version="2.12.0+git6bbd260", vendor="amd", toolkit="7.2.53211"), "7.2.3-123"),
}
SPECS = specs_of(load_manifests())


def _recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docker" / "metadata" / f"{name}.json").read_text())


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _installed(name: str) -> list[Installed]:
    """The recorded set and Halocline itself, as if they were installed."""
    recorded = _recorded(name)
    rows = [
        Installed(
            name=row["name"], version=row["version"], requires=tuple(row["requires"]), modules=tuple(row["modules"])
        )
        for row in [*recorded["given"], *recorded["packages"]]
    ]
    ours = Installed(name="halocline", version="0", requires=tuple(_project()["dependencies"]), modules=("halocline",))
    return [ours, *rows]


def _constraints(name: str) -> Constraints:
    return Constraints.read([ROOT / "constraints" / f"{name}.txt"])


def _conflicts(name: str, installed: list[Installed]) -> set[tuple[str, str]]:
    given = [row["name"] for row in _recorded(name)["given"]]
    roots = [package.name for package in installed]
    return {(c.name, c.requirement) for c in find_conflicts(installed, roots, given=given, environment=TARGET)}


@pytest.mark.parametrize("name", SETS)
def test_set_has_no_conflict_but_those_that_the_constraints_name(name: str) -> None:
    assert _conflicts(name, _installed(name)) == set(_constraints(name).accepted)


def test_the_verified_cuda_set_names_one_conflict_and_says_why() -> None:
    accepted = _constraints("cuda").accepted
    assert list(accepted) == [("sgl-flash-mla", "torch>=2.14.1")]
    assert "stable ABI" in accepted["sgl-flash-mla", "torch>=2.14.1"]
    assert _constraints("rocm").accepted == {}


@pytest.mark.parametrize("name", SETS)
def test_pins_are_what_was_recorded(name: str) -> None:
    versions = {canonical_name(package.name): package.version for package in _installed(name)}
    assert {pin: versions[pin] for pin in _constraints(name).pins} == _constraints(name).pins


@pytest.mark.parametrize("name", SETS)
def test_extra_asks_for_the_pinned_versions(name: str) -> None:
    pins = _constraints(name).pins
    for requirement in map(Requirement, _project()["optional-dependencies"][name]):
        pinned = pins.get(canonical_name(requirement.name))
        assert pinned is None or requirement.specifier.contains(pinned, prereleases=True)
        assert pinned or not requirement.specifier


def test_the_extra_leaves_out_what_the_resolver_must_not_touch() -> None:
    extras = _project()["optional-dependencies"]
    named = {name: {canonical_name(Requirement(row).name) for row in extras[name]} for name in SETS}
    assert {"torch", "triton", "amd-aiter", "aiter"} & (named["cuda"] | named["rocm"]) == set()
    assert "sgl-flash-mla" not in named["cuda"]


@pytest.mark.parametrize("name", SETS)
def test_each_package_is_locked_for_the_target(name: str) -> None:
    recorded = _recorded(name)
    assert (recorded["python"], recorded["platform"]) == ("3.12", "linux x86_64")
    for row in recorded["packages"]:
        assert re.fullmatch(r"[0-9a-f]{64}", row["sha256"])
        assert "+" not in row["version"]
        assert SpecifierSet(row["requires_python"] or "").contains("3.12.13"), row["name"]
    assert all(row["source"] for row in recorded["given"])


def test_core_dependencies_are_the_tested_ones_in_both_sets() -> None:
    tested = Constraints.read([ROOT / "constraints" / "tested.txt"]).pins
    core = {canonical_name(Requirement(row).name) for row in _project()["dependencies"]} - {"torch"}
    for name in SETS:
        versions = {canonical_name(package.name): package.version for package in _installed(name)}
        assert {pin: versions[pin] for pin in core} == {pin: tested[pin] for pin in core}


# ---- what an image's last build step would say ------------------------------------------------------------------


def _faults(name: str, installed: list[Installed], **changes: Any) -> list[str]:
    build, compiler = BUILDS[name]
    arguments = {"constraints": _constraints(name), "build": build, "compiler": compiler, **changes}
    checks = image_checks(installed, specs=SPECS, environment=TARGET, **arguments)
    return [f"{check.name}: {check.found}" for check in checks if check.state == "fault"]


def _with(name: str, *changed: Installed) -> list[Installed]:
    rows = {canonical_name(package.name): package for package in _installed(name)}
    rows |= {canonical_name(package.name): package for package in changed}
    return list(rows.values())


def _one(name: str, package: str) -> Installed:
    return next(row for row in _installed(name) if canonical_name(row.name) == package)


def test_the_recorded_cuda_set_passes_as_an_image() -> None:
    assert _faults("cuda", _installed("cuda")) == []


def test_the_kernel_library_cap_on_tvm_ffi_is_caught() -> None:
    newer = replace(_one("cuda", "apache-tvm-ffi"), version="0.1.13")
    assert _faults("cuda", _with("cuda", newer)) == [
        "requirements: sgl-deep-gemm requires apache-tvm-ffi==0.1.11, 0.1.13 is installed",
        "requirements: tilelang requires apache-tvm-ffi<0.1.13,>=0.1.11, 0.1.13 is installed",
        "pins: apache-tvm-ffi 0.1.13 is installed, 0.1.11 was recorded: it was swapped",
    ]


@pytest.mark.parametrize(
    ("module", "owner", "second"),
    [("flash_mla", "sgl-flash-mla", "tokenspeed-flashmla"), ("deep_gemm", "sgl-deep-gemm", "tokenspeed-deepgemm")],
)
def test_two_owners_of_a_kernel_module_are_caught(module: str, owner: str, second: str) -> None:
    other = Installed(name=second, version="2.5.0.post20260604", modules=(module,))
    assert _faults("cuda", _with("cuda", other)) == [f"module {module}: it is owned by {owner} and {second} at once"]


def test_a_foreign_owner_of_aiter_is_caught() -> None:
    without = [package for package in _installed("rocm") if package.name != "amd-aiter"]
    wrong = Installed(name="aiter", version="0.13.20191203", modules=("aiter",))
    assert "module aiter: it belongs to aiter, another library" in _faults("rocm", [*without, wrong])


def test_a_swapped_torch_is_caught_also_when_only_its_build_differs() -> None:
    for version in ("2.12.0", "2.12.0+cpu", "2.14.1"):
        swapped = replace(_one("rocm", "torch"), version=version)
        found = f"pins: torch {version} is installed, 2.12.0+git6bbd260 was recorded: it was swapped"
        assert found in _faults("rocm", _with("rocm", swapped))


def test_an_accepted_conflict_that_is_gone_is_caught() -> None:
    fixed = replace(_one("cuda", "sgl-flash-mla"), requires=("torch>=2.10",))
    assert _faults("cuda", _with("cuda", fixed)) == [
        "requirements: the accepted conflict 'sgl-flash-mla requires torch>=2.14.1' is not there"
    ]


def test_both_vendors_in_one_environment_are_caught() -> None:
    foreign = replace(_one("rocm", "amd-aiter"), requires=())
    assert _faults("cuda", _with("cuda", foreign)) == [
        "vendors: amd-aiter for amd, with torch 2.11.0+cu130 for nvidia 13.0"
    ]
    cpu = TorchBuild(version="2.13.0+cpu", vendor="cpu", toolkit="")
    both = [_one("rocm", "amd-aiter"), _one("cuda", "sglang-kernel")]
    found = [fault for fault in _faults("cuda", both, constraints=Constraints(), build=cpu) if "vendors" in fault]
    assert found == ["vendors: amd-aiter for amd; sglang-kernel for nvidia, with torch 2.13.0+cpu for cpu"]


@pytest.mark.parametrize(("name", "compiler"), [("cuda", "12.9.86"), ("cuda", None), ("rocm", "7.0.1-9")])
def test_a_tool_chain_of_another_version_is_caught(name: str, compiler: str | None) -> None:
    assert [f for f in _faults(name, _installed(name), compiler=compiler) if f.startswith("tool chain: ")]
    assert not [f for f in _faults(name, _installed(name)) if f.startswith("tool chain: ")]


def test_both_extras_are_declared_as_conflicting_for_uv() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["conflicts"]
    assert {frozenset(row["extra"] for row in pair) for pair in declared} == {frozenset(SETS)}
