"""Checks of an image by the metadata of what is installed in it: nothing is imported, no device is asked.

`pip check` knows requirements only. An image of ours also names the conflicts that it accepts, keeps the torch that
was recorded, has one owner for each kernel module, one vendor's kernels and one tool chain. What is looked at are
the packages that Halocline, the recorded pins and the kernels reach; what else a base image carries is its own affair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from halocline.hal.device import TorchBuild
from halocline.hal.doctor import Check
from halocline.hal.errors import SettingsError
from halocline.hal.inventory import canonical_name
from halocline.hal.op import KernelSpec
from halocline.hal.versions import satisfies

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = [
    "Conflict",
    "Constraints",
    "Installed",
    "compiler_version",
    "find_conflicts",
    "image_checks",
    "installed_here",
]

_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)$")
_ACCEPTED = re.compile(r"^# conflict: (\S+) requires ([^:]+): (\S.*)$")
ROOT_PACKAGE = "halocline"


@dataclass(frozen=True, kw_only=True)
class Installed:
    """One distribution, as its metadata states it.

    Attributes:
        name: Of the distribution.
        version: Of the distribution.
        requires: Its requirements, with markers.
        modules: Top-level modules that it owns.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A requirement that does not hold.

    Attributes:
        name: The distribution that asks.
        requirement: For what, without the marker.
        found: The version that is installed instead; empty when there is none.
    """

    name: str
    requirement: str
    found: str

    def __str__(self) -> str:
        return f"{self.name} requires {self.requirement}, {self.found or 'nothing'} is installed"


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a set of packages is pinned to, and which conflicts it accepts.

    Attributes:
        pins: Version by canonical name.
        accepted: Reason by canonical name and requirement.
    """

    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    accepted: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    @classmethod
    def read(cls, files: Iterable[Path]) -> Constraints:
        """Reads pip constraints files; `# conflict: NAME requires REQUIREMENT: REASON` accepts one conflict.

        Raises:
            SettingsError: On a line that is neither a pin nor a comment.
        """
        pins: dict[str, str] = {}
        accepted: dict[tuple[str, str], str] = {}
        for file in files:
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                if conflict := _ACCEPTED.match(line):
                    name, requirement, reason = conflict.groups()
                    accepted[canonical_name(name), requirement] = reason
                elif pin := _PIN.match(line.strip()):
                    pins[canonical_name(pin[1])] = pin[2]
                elif line.strip() and not line.startswith("#"):
                    raise SettingsError(
                        f"{file}:{number} is no pin\n  found  {line}\n  try    NAME==VERSION, or a comment"
                    )
        return cls(pins=pins, accepted=accepted)


def installed_here(path: list[str] | None = None) -> list[Installed]:
    """What is installed on a path (`sys.path` when left out); the first of two wins, as it does for an import."""
    import importlib.metadata
    import sys

    found: dict[str, Installed] = {}
    for distribution in importlib.metadata.distributions(path=sys.path if path is None else path):
        name = distribution.metadata["Name"]
        if not name or canonical_name(name) in found:
            continue
        found[canonical_name(name)] = Installed(
            name=name,
            version=distribution.version,
            requires=tuple(distribution.requires or ()),
            modules=tuple(sorted(_top_level(distribution))),
        )
    return list(found.values())


def _top_level(distribution: object) -> set[str]:
    files: Iterable[object] = getattr(distribution, "files", None) or ()
    tops = {str(path).split("/", 1)[0] for path in files}
    return {name.removesuffix(".py") for name in tops if not name.endswith((".dist-info", ".data", ".pth", ".."))} - {
        "__pycache__"
    }


def find_conflicts(
    installed: Sequence[Installed],
    roots: Collection[str],
    *,
    given: Collection[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Conflict]:
    """Every requirement that does not hold among what the roots reach.

    Args:
        installed: All that is installed.
        roots: Distributions to start from; one that is not installed is passed over.
        given: Distributions whose own dependencies come from elsewhere: a missing one is no conflict.
        environment: For markers, in place of this machine's.
    """
    from packaging.requirements import Requirement

    packages = {canonical_name(package.name): package for package in installed}
    exempt = {canonical_name(name) for name in given}
    todo = [(canonical_name(root), frozenset[str]()) for root in roots]
    seen: dict[str, set[str]] = {}
    conflicts: dict[tuple[str, str], Conflict] = {}
    while todo:
        name, extras = todo.pop()
        package = packages.get(name)
        if package is None or (name in seen and extras <= seen[name]):
            continue
        seen.setdefault(name, set()).update(extras)
        for requirement in map(Requirement, package.requires):
            if not _applies(requirement, seen[name], environment):
                continue
            wanted = canonical_name(requirement.name)
            other = packages.get(wanted)
            missing = other is None and name not in exempt
            wrong = other is not None and not requirement.specifier.contains(other.version, prereleases=True)
            if missing or wrong:
                text = f"{requirement.name}{requirement.specifier}"
                found = other.version if other else ""
                conflicts[name, text] = Conflict(name=package.name, requirement=text, found=found)
            todo.append((wanted, frozenset(requirement.extras)))
    return [conflicts[key] for key in sorted(conflicts)]


def _applies(requirement: Requirement, extras: Iterable[str], environment: Mapping[str, str] | None) -> bool:
    if requirement.marker is None:
        return True
    given = dict(environment or {})
    return any(requirement.marker.evaluate({**given, "extra": extra}) for extra in ("", *extras))


def image_checks(
    installed: Sequence[Installed],
    constraints: Constraints,
    specs: Sequence[KernelSpec],
    build: TorchBuild | None,
    compiler: str | None,
    *,
    environment: Mapping[str, str] | None = None,
) -> list[Check]:
    """All checks of an image, in reading order.

    Args:
        installed: What is installed.
        constraints: What was recorded for this image.
        specs: Kernels; their providers say which distribution may own which module.
        build: Of torch.
        compiler: Version of the vendor's compiler tool kit; None when there is none.
        environment: For markers, in place of this machine's.
    """
    providers = {canonical_name(p.distribution) for spec in specs for p in (*spec.providers, *spec.requires)}
    roots = {ROOT_PACKAGE, *constraints.pins, *providers}
    conflicts = find_conflicts(installed, roots, environment=environment)
    return [
        *_requirement_checks(conflicts, constraints),
        *_pin_checks(installed, constraints),
        *_owner_checks(installed, specs),
        _vendor_check(installed, constraints, specs, build),
        _tool_chain_check(build, compiler),
    ]


def _requirement_checks(conflicts: Sequence[Conflict], constraints: Constraints) -> Iterator[Check]:
    met = {(canonical_name(c.name), c.requirement): c for c in conflicts}
    for key, conflict in met.items():
        if key in constraints.accepted:
            yield Check(name="requirements", state="remark", found=f"{conflict}: {constraints.accepted[key]}")
        else:
            yield Check(
                name="requirements",
                state="fault",
                found=str(conflict),
                remedy="install what it asks for, or accept it with its reason in the constraints file",
            )
    for name, requirement in constraints.accepted.keys() - met.keys():
        yield Check(
            name="requirements",
            state="fault",
            found=f"the accepted conflict '{name} requires {requirement}' is not there",
            remedy="remove it from the constraints file",
        )
    if not met and not constraints.accepted:
        yield Check(name="requirements", state="ok", found="all of them hold")


def _pin_checks(installed: Sequence[Installed], constraints: Constraints) -> Iterator[Check]:
    packages = {canonical_name(package.name): package for package in installed}
    held = swapped = 0
    for name, version in sorted(constraints.pins.items()):
        package = packages.get(name)
        if package is not None and satisfies(package.version, f"=={version}"):
            held += 1
        elif package is not None:
            swapped += 1
            yield Check(
                name="pins",
                state="fault",
                found=f"{package.name} {package.version} is installed, {version} was recorded: it was swapped",
                remedy="install with the constraints file",
            )
    if "torch" not in packages:
        yield Check(name="pins", state="fault", found="torch is not installed")
    if not swapped:
        found = f"{held} of {len(constraints.pins)} recorded versions are here, none was swapped"
        yield Check(name="pins", state="ok", found=found)


def _owner_checks(installed: Sequence[Installed], specs: Sequence[KernelSpec]) -> Iterator[Check]:
    """Each module that kernels come from has one owner, and it is one of those that the manifests name."""
    wanted: dict[str, set[str]] = {}
    for spec in specs:
        for provider in (*spec.providers, *spec.requires):
            wanted.setdefault(provider.module, set()).add(canonical_name(provider.distribution))
    for module, known in sorted(wanted.items()):
        owners = sorted(package.name for package in installed if module in package.modules)
        strangers = [owner for owner in owners if canonical_name(owner) not in known]
        if strangers:
            yield Check(
                name=f"module {module}",
                state="fault",
                found=f"it belongs to {' and '.join(strangers)}, another library",
                remedy=f"uninstall that; {' or '.join(sorted(known))} is the one",
            )
        elif len(owners) > 1:
            yield Check(
                name=f"module {module}",
                state="fault",
                found=f"it is owned by {' and '.join(owners)} at once",
                remedy="uninstall all but one and install that again",
            )
        elif owners:
            yield Check(name=f"module {module}", state="ok", found=f"from {owners[0]}")


def _vendor_check(
    installed: Sequence[Installed], constraints: Constraints, specs: Sequence[KernelSpec], build: TorchBuild | None
) -> Check:
    """Kernels of another vendor than torch's mean that two extras were mixed; what is pinned is meant to be there."""
    serves: dict[str, set[str]] = {}
    for spec in specs:
        for provider in (*spec.providers, *spec.requires):
            serves.setdefault(canonical_name(provider.distribution), set()).add(spec.vendor)
    found: dict[str, list[str]] = {}
    for package in installed:
        vendors = serves.get(canonical_name(package.name), set()) - {""}
        if len(vendors) == 1 and canonical_name(package.name) not in constraints.pins:
            found.setdefault(min(vendors), []).append(package.name)
    own = build.vendor if build is not None and build.toolkit else ""
    listed = "; ".join(f"{', '.join(sorted(found[vendor]))} for {vendor}" for vendor in sorted(found))
    if (found.keys() - {own}) if own else len(found) > 1:
        return Check(
            name="vendors",
            state="fault",
            found=f"{listed}, with {build or 'no torch'}",
            remedy="install one of the extras, not both",
        )
    return Check(name="vendors", state="ok", found=listed or "nothing beside what was recorded")


def _tool_chain_check(build: TorchBuild | None, compiler: str | None) -> Check:
    """Kernels that are compiled on first use need the tool kit that torch was built with."""
    if build is None or not build.toolkit:
        return Check(name="tool chain", state="ok", found="torch is built for the CPU and needs none")
    wanted = ".".join(build.toolkit.split(".")[:2])
    if compiler is None:
        return Check(name="tool chain", state="fault", found=f"no compiler, {build} needs {wanted}")
    if compiler.split(".")[:2] != wanted.split("."):
        return Check(name="tool chain", state="fault", found=f"compiler {compiler}, {build} needs {wanted}")
    return Check(name="tool chain", state="ok", found=f"compiler {compiler}, {build}")


def compiler_version(vendor: str, root: Path = Path("/")) -> str | None:
    """Version of a vendor's compiler tool kit, read from the file that it ships."""
    if vendor == "nvidia":
        file = root / "usr/local/cuda/version.json"
        return str(json.loads(file.read_text())["cuda_nvcc"]["version"]) if file.is_file() else None
    file = root / "opt/rocm/.info/version"
    return file.read_text().strip() if file.is_file() else None
