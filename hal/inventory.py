"""Inventory: which distributions are installed and which module each owns, by metadata, without importing any."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Inventory", "Package", "canonical_name", "local_inventory"]


def canonical_name(distribution: str) -> str:
    """The normalised name of a distribution: lower case, runs of separators as one dash."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed distribution.

    Attributes:
        distribution: Its name.
        version: Its version, as its metadata states it.
        modules: Top-level modules that it owns, as far as they were asked for.
    """

    distribution: str
    version: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What is installed on a machine.

    Attributes:
        packages: By canonical name.
        import_errors: By module, why importing it failed; filled in by an import probe only.
    """

    packages: Mapping[str, Package] = field(default_factory=dict[str, Package])
    import_errors: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, packages: Iterable[Package], *, import_errors: Mapping[str, str] | None = None) -> Inventory:
        """Builds an inventory from packages."""
        return cls(
            packages={canonical_name(found.distribution): found for found in packages},
            import_errors=dict(import_errors or {}),
        )

    def find(self, distribution: str) -> Package | None:
        """The installed package of this name, or None."""
        return self.packages.get(canonical_name(distribution))

    def owners(self, module: str) -> tuple[Package, ...]:
        """The distributions that own a top-level module, by name."""
        return tuple(self.packages[name] for name in sorted(self.packages) if module in self.packages[name].modules)


def local_inventory(
    modules: Iterable[str], distributions: Iterable[str], *, path: list[str] | None = None
) -> Inventory:
    """Reads what is installed here.

    Only distributions that are asked for, or that own a module that is asked for, are listed. Owners of a module are
    looked for only when the module is on the path at all, so that a machine without kernel packages costs nothing.

    Args:
        modules: Top-level modules whose owners matter.
        distributions: Distributions whose version matters.
        path: Folders to look in; `sys.path` when left out.
    """
    import sys

    folders = [Path(entry or ".") for entry in (sys.path if path is None else path)]
    wanted = {canonical_name(name) for name in distributions}
    present = {module for module in set(modules) if any(_holds(folder, module) for folder in folders)}
    packages: dict[str, Package] = {}
    for found in importlib.metadata.distributions(path=[str(folder) for folder in folders]):
        name = found.metadata["Name"] if present else _name_of(found)
        if not name or canonical_name(name) in packages:
            continue
        owned = tuple(sorted(present.intersection(_top_level(found)))) if present else ()
        if owned or canonical_name(name) in wanted:
            packages[canonical_name(name)] = Package(distribution=name, version=found.version, modules=owned)
    return Inventory(packages=packages)


def _holds(folder: Path, module: str) -> bool:
    return (folder / module).is_dir() or (folder / f"{module}.py").is_file()


def _name_of(found: importlib.metadata.Distribution) -> str:
    return found.metadata["Name"] or ""


def _top_level(found: importlib.metadata.Distribution) -> set[str]:
    """Top-level modules of a distribution: from its file list, else from top_level.txt."""
    listed = found.read_text("RECORD")
    if listed:
        tops = {line.split(",", 1)[0].split("/", 1)[0] for line in listed.splitlines() if line}
        return {name.removesuffix(".py") for name in tops if not name.endswith((".dist-info", ".data"))}
    return set((found.read_text("top_level.txt") or "").split())
