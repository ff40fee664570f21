"""What tests of the HAL share: made-up kernels, requests and installed distributions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from halocline.hal.backend import load_manifests, specs_of
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec
from halocline.hal.request import KernelRequest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # importlib mode leaves test folders out
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def specs() -> tuple[KernelSpec, ...]:
    """Every kernel of every backend in this repository."""
    return specs_of(load_manifests())


@pytest.fixture(scope="session")
def everything_installed(specs: tuple[KernelSpec, ...]) -> Inventory:
    """One working provider of every library that any kernel names, for either vendor."""
    chosen = {p.module: p for spec in specs for p in reversed((*spec.providers, *spec.requires))}
    modules: dict[str, list[str]] = {}
    for module, provider in chosen.items():
        modules.setdefault(provider.distribution, []).append(module)
    oldest = {p.distribution: p.versions.split(",")[0].lstrip(">=") for p in chosen.values()}
    return Inventory.of(
        Package(distribution=name, version=oldest[name], modules=tuple(sorted(owned)))
        for name, owned in modules.items()
    )


@pytest.fixture
def make_spec() -> Callable[..., KernelSpec]:
    """A kernel of `norm.rms_norm` that suits everything unless told otherwise."""

    def make(name: str = "toy", **changes: Any) -> KernelSpec:
        facts: dict[str, Any] = {
            "op": "norm.rms_norm",
            "name": name,
            "target": f"toys.{name}:kernel",
            "formats": {"compute": ("bfloat16",)},
            "rank": 20,
        }
        return KernelSpec(**{**facts, **changes})

    return make


@pytest.fixture
def kernels(make_spec: Callable[..., KernelSpec]) -> tuple[KernelSpec, ...]:
    """A tuned, a library, a portable kernel, one for the other vendor, and the reference."""
    return (
        make_spec("tuned", rank=80, vendor="nvidia", archs=("sm_100",)),
        make_spec("library", rank=60, vendor="nvidia"),
        make_spec("portable", rank=20),
        make_spec("other", rank=70, vendor="amd"),
        make_spec("reference", rank=0),
    )


@pytest.fixture
def make_request() -> Callable[..., KernelRequest]:
    """A request for `norm.rms_norm` outside of layers unless told otherwise."""

    def make(**changes: Any) -> KernelRequest:
        return KernelRequest(**{"op": "norm.rms_norm", "formats": {"compute": ("bfloat16",)}, **changes})

    return make


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Path]:
    """Puts a made-up distribution into a folder that stands for a site-packages."""
    site = tmp_path / "site"

    def put(
        distribution: str,
        version: str,
        modules: Mapping[str, str] | None = None,
        entry_points: str = "",
        record: bool = True,
    ) -> Path:
        """Installs a distribution whose modules have the given source texts."""
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        files = []
        for module, source in (modules or {}).items():
            file = site / module / "__init__.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(source)
            files.append(f"{module}/__init__.py,,")
        if record:
            (info / "RECORD").write_text("\n".join([*files, f"{info.name}/METADATA,,", ""]))
        else:
            (info / "top_level.txt").write_text("\n".join(modules or {}))
        if entry_points:
            (info / "entry_points.txt").write_text(entry_points)
        return site

    return put
