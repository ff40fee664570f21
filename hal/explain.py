"""Explaining a choice: the table of a model on a device, with every reason, without loading anything.

The device may be this machine's or a recorded one. What is installed may be read from this machine, taken from the
device's record, or left out altogether.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halocline.hal.backend import Manifest, load_manifests, specs_of
from halocline.hal.device import Device
from halocline.hal.errors import OverrideError, lines
from halocline.hal.inventory import Inventory
from halocline.hal.op import KernelSpec
from halocline.hal.prefill_layout import decide_prefill_layout
from halocline.hal.probe import probe
from halocline.hal.profiles import profile
from halocline.hal.selection import resolve
from halocline.hal.settings import Settings, nearest, process_settings
from halocline.hal.stages import rank_on, status_on
from halocline.hal.startup import Describe, installed_for, policy_of
from halocline.hal.table import KernelTable

__all__ = ["Explanation", "Packages", "explain", "kernel_rows"]

Packages = Literal["recorded", "local", "none"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A table with what it was asked for.

    Attributes:
        model: Name of the model.
        device: Name under which the device was asked for, or its architecture.
        packages: Where the list of installed packages came from.
        table: The choice.
        ops: Ops that were asked about; all when empty.
    """

    model: str
    device: str
    packages: Packages
    table: KernelTable
    ops: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row for each op that was asked about."""
        return [row for row in self.table.rows() if not self.ops or row["op"] in self.ops]

    def to_json(self) -> dict[str, Any]:
        """What `explain --json` prints. `planned` counts the ops whose kernel is still to come."""
        rows = self.rows()
        return {
            "device": self.device,
            "model": self.model,
            "packages": self.packages,
            "planned": len({row["op"] for row in rows if row["status"] == "planned"}),
            "notes": list(self.table.notes),
            "ops": rows,
        }


def explain(
    describe: Describe,
    *,
    model: str,
    device: str | None = None,
    packages: Packages | None = None,
    kernels: Sequence[str] = (),
    model_defaults: Sequence[str] = (),
    ops: Sequence[str] = (),
    settings: Settings | None = None,
    manifests: Sequence[Manifest] | None = None,
) -> Explanation:
    """Chooses kernels as a run would, and keeps every reason.

    Args:
        describe: Gives the model's requests for a device and a prefill layout.
        model: Its name.
        device: Name of a recorded device; this machine's device when left out.
        packages: Where to look for packages: `recorded` by default for a named device, `local` for this machine.
        kernels: Overrides, as given to `--kernel`.
        model_defaults: What the model prefers, in the same syntax.
        ops: Ops to limit the answer to; an unknown name is an error.
        settings: Of the process.
        manifests: The backends; every installed one when left out.

    Raises:
        DeviceError: If the device is unknown, or this machine's cannot be used.
        OverrideError: If an override or an op names what does not exist.
        NoKernelError: If an explicit choice cannot be honoured.
    """
    settings = process_settings() if settings is None else settings
    specs = specs_of(load_manifests() if manifests is None else manifests)
    recorded = None if device is None else profile(device)
    target: Device = probe(settings, load_torch=False) if recorded is None else recorded.device
    packages = packages or ("local" if recorded is None else "recorded")
    if packages == "local":
        inventory = installed_for(specs)
    elif packages == "none":
        inventory = Inventory()
    else:
        inventory = (recorded or profile(target.arch)).inventory
    _check_ops(ops, specs)
    table = resolve(
        describe(target, decide_prefill_layout(settings, target)),
        specs=specs,
        device=target,
        inventory=inventory,
        policy=policy_of(settings, target, flags=kernels, model_defaults=model_defaults, planned=recorded is not None),
    )
    return Explanation(model=model, device=target.arch, packages=packages, table=table, ops=tuple(ops))


def kernel_rows(specs: Sequence[KernelSpec], *, arch: str | None = None) -> list[dict[str, Any]]:
    """Every kernel as a row for `kernels list`; rank and status for one architecture when it is named."""
    return [
        {
            "op": spec.op,
            "kernel": spec.name,
            "vendor": spec.vendor or "any",
            "archs": list(spec.archs),
            "rank": spec.rank if arch is None else rank_on(spec, arch),
            "status": spec.status if arch is None else status_on(spec, arch),
            "target": spec.target,
            "providers": [f"{p.distribution}{p.versions}" for p in (*spec.providers, *spec.requires)],
            "formats": {name: list(values) for name, values in spec.formats.items()},
            "semantics": {name: list(values) for name, values in spec.semantics.items()},
            "traits": {name: list(values) for name, values in spec.traits.items()},
            "deterministic": spec.deterministic,
            "graph_safe": spec.graph_safe,
            "known_bad": [f"{bad.reason} ({bad.source})" for bad in spec.known_bad],
        }
        for spec in sorted(specs, key=lambda s: (s.op, s.vendor, s.name))
    ]


def _check_ops(ops: Sequence[str], specs: Sequence[KernelSpec]) -> None:
    known = sorted({spec.op for spec in specs})
    for op in ops:
        if op not in known:
            raise OverrideError(lines(f"unknown op {op!r}", nearest=nearest(op, known), known=", ".join(known)))
