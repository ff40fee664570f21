"""Backend: the kernels and runtime services of one vendor, found through the entry-point group `halocline.backends`.

A backend is announced by a `Manifest`: data that can be read on any machine. Its runtime services are imported only
when a device of its vendor is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

from halocline.hal.errors import ConfigError, KernelImportError, lines
from halocline.hal.op import KernelSpec

__all__ = ["GROUP", "Backend", "Manifest", "Progress", "load_backend", "load_manifests", "specs_of"]

GROUP = "halocline.backends"

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Takes the size of some work and shows, within, how much of it is done."""


class Backend(Protocol):
    """Runtime services of one vendor: what the engine needs of a device beside kernels."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records what `run` launches; the result launches it again on the same buffers.

        Args:
            run: Uses only buffers that keep their addresses. It has been run before, so nothing is compiled in it.
        """
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device of this process."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has done what was launched."""
        ...

    def can_build(self, libraries: Collection[str]) -> bool:
        """Whether `build` knows what kernels over these libraries launch."""
        ...

    def build(self, run: Callable[[], None], *, libraries: Collection[str], workers: int, progress: Progress) -> None:
        """Compiles side by side what `run` would launch, so that a call of it afterwards finds it compiled.

        A start never fails here: what cannot be compiled now is left to the launch.

        Args:
            run: Called once, with its launches recorded instead of done; it reads and writes nothing but scratch.
            libraries: What its kernels are called from, as `can_build` took it.
            workers: Processors that may compile.
            progress: Shows how many kernels are ready, unless they all are at once.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The kernels of one backend, as data.

    Attributes:
        name: `reference`, `cuda`, `hip`, or an extension's own.
        vendor: Whose devices it serves; empty for kernels that run anywhere.
        specs: One record for each kernel.
        runtime: `package.module:object` of its `Backend`; empty when it brings none.
        cases: `package.module:function` of its inputs for an op family, with `{family}` where the name goes;
            empty when it brings none.
    """

    name: str
    vendor: str
    specs: tuple[KernelSpec, ...]
    runtime: str = ""
    cases: str = ""

    def __post_init__(self) -> None:
        for spec in self.specs:
            if self.vendor and spec.vendor != self.vendor:
                raise ConfigError(
                    f"manifest {self.name!r}: {spec.op}={spec.name} is of vendor {spec.vendor!r}, not {self.vendor!r}"
                )


def load_manifests(path: Sequence[str] | None = None) -> tuple[Manifest, ...]:
    """Loads every installed manifest, by name.

    Args:
        path: Folders to look for distributions in; `sys.path` when left out.

    Raises:
        ConfigError: If an entry point does not lead to a manifest, or two kernels have one name.
    """
    if path is None:
        points = list(importlib.metadata.entry_points(group=GROUP))
    else:
        found = importlib.metadata.distributions(path=list(path))
        points = [point for dist in found for point in dist.entry_points if point.group == GROUP]
    manifests: dict[str, Manifest] = {}
    for point in sorted(points, key=lambda p: (p.name, p.value)):
        try:
            manifest = point.load()
        except (ImportError, AttributeError) as error:
            raise _bad_entry(point, error) from error
        if not isinstance(manifest, Manifest):
            raise _bad_entry(point, f"a {type(manifest).__name__}")
        known = manifests.setdefault(point.name, manifest)
        if known is not manifest:
            raise _bad_entry(point, "a second backend of that name")
    loaded = tuple(manifests[name] for name in sorted(manifests))
    specs_of(loaded)
    return loaded


def load_backend(manifests: Iterable[Manifest], vendor: str) -> Backend | None:
    """Imports the runtime services for a vendor's devices, or gives None where a backend brings none.

    Raises:
        KernelImportError: If they do not import.
    """
    target = next((manifest.runtime for manifest in manifests if manifest.vendor == vendor and manifest.runtime), "")
    if not target:
        return None
    module, _, attribute = target.partition(":")
    try:
        return cast(Backend, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise KernelImportError(
            lines(f"the runtime services for {vendor} cannot be loaded", target=target, found=error)
        ) from error


def specs_of(manifests: Iterable[Manifest]) -> tuple[KernelSpec, ...]:
    """The kernels of several manifests.

    Raises:
        ConfigError: If two kernels of one op that can meet on a device have the same name.
    """
    specs: list[KernelSpec] = []
    homes: dict[tuple[str, str], dict[str, str]] = {}
    for manifest in manifests:
        for spec in manifest.specs:
            known = homes.setdefault((spec.op, spec.name), {})
            clash = next((vendor for vendor in known if spec.vendor in ("", vendor) or not vendor), None)
            if clash is not None:
                raise ConfigError(
                    f"two kernels are called {spec.op}={spec.name}: for {clash or 'any vendor'} in the manifest "
                    f"{known[clash]!r}, for {spec.vendor or 'any vendor'} in the manifest {manifest.name!r}"
                )
            known[spec.vendor] = manifest.name
            specs.append(spec)
    return tuple(specs)


def _bad_entry(point: importlib.metadata.EntryPoint, found: object) -> ConfigError:
    return ConfigError(
        lines(
            f"the backend {point.name!r} cannot be loaded",
            entry=f"{GROUP}: {point.name} = {point.value}",
            expected="a halocline.hal.backend.Manifest",
            found=found,
        )
    )
