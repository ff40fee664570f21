"""The choice of kernels for a run, from the pieces: device, inventory, manifests, overrides, requests.

Everything that looks at this machine happens here, once per process and in the process that uses the device; the
choice itself is the pure function `halocline.hal.selection.bind`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from halocline.hal.backend import Manifest, load_manifests, specs_of
from halocline.hal.device import Device
from halocline.hal.errors import OverrideError, lines
from halocline.hal.inventory import Inventory, local_inventory
from halocline.hal.op import Determinism, KernelSpec
from halocline.hal.ops.attention import PrefillLayout
from halocline.hal.overrides import collect_overrides
from halocline.hal.prefill_layout import decide_prefill_layout
from halocline.hal.probe import probe
from halocline.hal.request import KernelRequest
from halocline.hal.selection import bind
from halocline.hal.settings import Settings, set_cache_variables
from halocline.hal.stages import Policy
from halocline.hal.table import KernelTable, layer_text
from halocline.hal.watch import watch_for

__all__ = ["Describe", "choose_kernels", "installed_for", "policy_of"]

logger = logging.getLogger(__name__)

Describe = Callable[[Device, PrefillLayout], Sequence[KernelRequest]]


def choose_kernels(
    describe: Describe,
    *,
    settings: Settings,
    flags: Sequence[str] = (),
    model_defaults: Sequence[str] = (),
    device: Device | None = None,
    inventory: Inventory | None = None,
    manifests: Sequence[Manifest] | None = None,
    graphs: bool = False,
) -> KernelTable:
    """Chooses the kernels of a run and logs the table in one line. Their libraries are told where to keep caches.

    Args:
        describe: Gives the model's requests for a device and a prefill layout.
        settings: Of the process.
        flags: Values of `--kernel`.
        model_defaults: What the model prefers, in the syntax of overrides.
        device: What to run on; probed when left out.
        inventory: What is installed; read from this machine when left out.
        manifests: The backends; every installed one when left out.
        graphs: Whether steps will be captured.

    Raises:
        NoKernelError: If a request has no kernel or a choice cannot be honoured.
        OverrideError: If an override names what does not exist.
        DeviceError: If the device cannot be used.
    """
    set_cache_variables(settings)
    device = probe(settings) if device is None else device
    specs = specs_of(load_manifests() if manifests is None else manifests)
    requests = describe(device, decide_prefill_layout(settings, device))
    table = bind(
        requests,
        specs=specs,
        device=device,
        inventory=installed_for(specs) if inventory is None else inventory,
        policy=policy_of(settings, device, flags=flags, model_defaults=model_defaults, graphs=graphs),
    )
    if graphs and table.compared:
        raise OverrideError(
            lines(
                f"comparison of {', '.join(table.compared)} cannot run in captured graphs",
                found="steps are captured: what a graph replays is not compared",
                try_="run without graphs, or drop the comparison",
            )
        )
    _log(table)
    watch = watch_for(compared=bool(table.compared), record=settings.record, folder=settings.dump_folder())
    return table if watch is None else replace(table, watch=watch)


def policy_of(
    settings: Settings,
    device: Device,
    *,
    flags: Sequence[str] = (),
    model_defaults: Sequence[str] = (),
    graphs: bool = False,
    planned: bool = False,
) -> Policy:
    """What the user wants of every kernel, from flags, environment, file and the model's defaults."""
    overrides, notes = collect_overrides(flags=flags, settings=settings, model_defaults=model_defaults, device=device)
    determinism: Determinism = "batch" if settings.deterministic else "none"
    return Policy(overrides=overrides, notes=notes, determinism=determinism, graphs=graphs, planned=planned)


def installed_for(specs: Sequence[KernelSpec]) -> Inventory:
    """What is installed on this machine of everything that some kernel may need."""
    providers = [provider for spec in specs for provider in (*spec.providers, *spec.requires)]
    return local_inventory({p.module for p in providers}, {p.distribution for p in providers})


def _log(table: KernelTable) -> None:
    logger.info("%s", table.summary())
    for note in table.notes:
        logger.info("%s", note)
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for binding in table.bindings:
        where = "" if binding.layers is None else f"@layers={layer_text(binding.layers)}"
        logger.debug("%s%s: %s (%s)", binding.op, where, binding.chosen, binding.source)
        for rejection in binding.rejected:
            logger.debug("  %s: %s: %s", rejection.kernel, rejection.stage, rejection.reason)
