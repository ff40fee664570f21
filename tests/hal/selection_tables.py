"""What tests of selection share: a table from made-up kernels, and what it says of one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halocline.hal.inventory import Inventory
from halocline.hal.op import KernelSpec
from halocline.hal.overrides import collect_overrides
from halocline.hal.profiles import profile
from halocline.hal.request import KernelRequest
from halocline.hal.selection import bind
from halocline.hal.settings import Settings
from halocline.hal.stages import Policy
from halocline.hal.table import KernelTable

MakeSpec = Callable[..., KernelSpec]
MakeRequest = Callable[..., KernelRequest]
OP = "norm.rms_norm"


def table(
    specs: Sequence[KernelSpec],
    requests: Sequence[KernelRequest],
    *,
    device: str = "sm_90",
    flags: Sequence[str] = (),
    defaults: Sequence[str] = (),
    inventory: Inventory | None = None,
    call: Callable[..., KernelTable] = bind,
    **variables: str,
) -> KernelTable:
    settings = Settings.read({f"HALOCLINE_{name.upper()}": text for name, text in variables.items()})
    found = profile(device).device
    overrides, notes = collect_overrides(flags=flags, settings=settings, model_defaults=defaults, device=found)
    return call(
        requests,
        specs=specs,
        device=found,
        inventory=inventory or Inventory(),
        policy=Policy(overrides=overrides, notes=notes),
    )


def chosen(found: KernelTable, op: str = OP, layer: int | None = None) -> tuple[str | None, str]:
    binding = found.find(op, layer)
    return binding.chosen, binding.source


def stages(found: KernelTable, op: str = OP) -> dict[str, list[str]]:
    by_kernel: dict[str, list[str]] = {}
    for rejection in found.find(op).rejected:
        by_kernel.setdefault(rejection.kernel, []).append(rejection.stage)
    return by_kernel
