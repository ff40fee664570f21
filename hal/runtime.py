"""From a table to callables: importing the chosen kernels, once, before the first step.

Nothing is chosen here. A target that does not import ends start-up with the original exception chained and the
versions found and needed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from halocline.hal.compare import Named
from halocline.hal.errors import ConfigError, KernelImportError, lines
from halocline.hal.inventory import Inventory, local_inventory
from halocline.hal.logs import own_loggers
from halocline.hal.op import KernelSpec, Op, Provider
from halocline.hal.ops import Ops, find_op
from halocline.hal.providers import choose_provider
from halocline.hal.record import Recorder
from halocline.hal.table import Binding, Bound, KernelTable
from halocline.hal.watch import PLAN

__all__ = ["import_provider", "load_kernel", "load_ops", "load_prepare", "load_target"]

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]


def load_ops(table: KernelTable, layer: int | None = None) -> Ops:
    """Imports the kernels of a layer.

    Args:
        table: From `bind`. Its watch, if it has one, sees compared and recorded ops.
        layer: Number of the layer, draft layers counted on; None outside of layers.

    Raises:
        KernelImportError: If a chosen kernel does not import.
        ConfigError: If the table compares an op and has no watch to report to.
    """
    watch = table.watch
    kernels: dict[str, Kernel] = {}
    for name in table.ops(layer):
        binding = table.find(name, layer)
        if len(binding.kernels) > 1:
            loaded = _load_compared(table, binding, layer)
        elif watch is not None and watch.recorder is not None and watch.recorder.wants(name):
            loaded = _load_recorded(table, binding, layer, watch.recorder)
        else:
            loaded = _load_plain(binding)
        kernels.update(loaded)
    if watch is not None and PLAN in kernels:
        kernels[PLAN] = watch.counting(kernels[PLAN])
    return Ops(kernels)


def _load_plain(binding: Binding) -> dict[str, Kernel]:
    (bound,) = binding.kernels
    kernels = {binding.op: load_kernel(bound)}
    if has_prepare(binding.op):
        kernels[prepare_name(binding.op)] = load_prepare(bound)
    return kernels


def _load_compared(table: KernelTable, binding: Binding, layer: int | None) -> dict[str, Kernel]:
    comparison = table.watch.comparison if table.watch is not None else None
    if comparison is None:
        raise ConfigError(f"{binding.op} is compared ({binding.chosen}), and the table has no watch to report to")
    op = _contract(binding.op)
    first, second = (Named(name=bound.spec.name, run=load_kernel(bound)) for bound in binding.kernels)
    kernels = {binding.op: comparison.kernel(op, layer, first, second, _read_rows(table, layer))}
    if op.prepare is not None:
        convert = [load_prepare(bound) for bound in binding.kernels]
        kernels[prepare_name(binding.op)] = comparison.prepare(op, convert[0], convert[1])
    return kernels


def _load_recorded(table: KernelTable, binding: Binding, layer: int | None, recorder: Recorder) -> dict[str, Kernel]:
    op = _contract(binding.op)
    (bound,) = binding.kernels
    kernel = recorder.kernel(op, bound.spec.name, layer, load_kernel(bound), _read_rows(table, layer))
    kernels = {binding.op: kernel}
    if op.prepare is not None:
        kernels[prepare_name(binding.op)] = recorder.prepare(op, load_prepare(bound))
    return kernels


def _contract(name: str) -> Op[..., Any]:
    found = find_op(name)
    if found is None:
        raise AssertionError(f"{name} is bound, but there is no such contract")
    return found


def _read_rows(table: KernelTable, layer: int | None) -> Kernel | None:
    """The bound kernel that reads cache rows as values, for comparing what was written."""
    name = "kv_cache.read_rows"
    return load_kernel(table.find(name, layer).kernels[0]) if name in table.ops(layer) else None


def prepare_name(op: str) -> str:
    """Name under which `Ops` holds the load-time conversion of an op: `gemm.prepare_linear`."""
    family, _, short = op.partition(".")
    return f"{family}.prepare_{short}"


def has_prepare(op: str) -> bool:
    """Whether an op has a load-time conversion."""
    found = find_op(op)
    return found is not None and found.prepare is not None


def load_kernel(bound: Bound) -> Kernel:
    """Imports a chosen kernel's function."""
    return load_target(bound.spec.target, bound)


def load_prepare(bound: Bound) -> Kernel:
    """Imports a chosen kernel's load-time conversion."""
    if not bound.spec.prepare:
        raise KernelImportError(
            lines(
                f"the kernel {bound.spec.op}={bound.spec.name} names no load-time conversion",
                expected="prepare='package.module:function' in its record",
            )
        )
    return load_target(bound.spec.prepare, bound)


def load_target(target: str, bound: Bound) -> Kernel:
    """Imports `package.module:function`.

    Raises:
        KernelImportError: If that fails, for whatever reason; the original exception is chained.
    """
    module_name, _, attribute = target.partition(":")
    try:
        kernel = getattr(_quietly_import(module_name), attribute)
    except Exception as error:  # a library may raise anything at import
        raise _not_importable(bound.spec, target, bound.provider, bound.version, error) from error
    logger.debug("%s=%s from %s", bound.spec.op, bound.spec.name, target)
    if not callable(kernel):
        raise _not_importable(bound.spec, target, bound.provider, bound.version, f"a {type(kernel).__name__}")
    return kernel  # type: ignore[no-any-return]


@functools.cache
def import_provider(providers: tuple[Provider, ...]) -> ModuleType:
    """Imports the library of a kernel: the same provider that selection chose.

    Kernel adapters call this, with the tuple of their own record, instead of trying one import after the other.

    Raises:
        KernelImportError: If no provider will do, or importing it fails; the original exception is chained.
    """
    provider, problems = choose_provider(providers, provider_inventory(providers))
    if provider is None:
        raise KernelImportError(lines("no provider of a kernel's library", **_numbered("found", problems)))
    try:
        return _quietly_import(provider.module)
    except Exception as error:  # a library may raise anything at import
        found = provider_inventory(providers).find(provider.distribution)
        raise KernelImportError(
            lines(
                f"importing {provider.module} failed",
                package=f"{provider.distribution} {found.version if found else '?'}, needed {provider.versions}",
                found=f"{type(error).__name__}: {error}",
                try_=f"halocline doctor, or reinstall {provider.distribution}",
            )
        ) from error


def provider_inventory(providers: Sequence[Provider]) -> Inventory:
    """What is installed here of some providers."""
    return local_inventory({p.module for p in providers}, {p.distribution for p in providers})


def _quietly_import(name: str) -> ModuleType:
    module = import_module(name)
    own_loggers()
    return module


def _not_importable(
    spec: KernelSpec, target: str, provider: Provider | None, version: str, found: object
) -> KernelImportError:
    shown = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else found
    return KernelImportError(
        lines(
            f"the kernel {spec.op}={spec.name} cannot be loaded",
            target=target,
            package=f"{provider.distribution} {version}, needed {provider.versions}" if provider else None,
            found=shown,
            try_=f"halocline doctor, or --kernel '{spec.op}=!{spec.name}' to go without it",
        )
    )


def _numbered(label: str, texts: Sequence[str]) -> dict[str, str]:
    return {f"{label} {number}": text for number, text in enumerate(texts, 1)}
