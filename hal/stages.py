"""The stages that a kernel passes before it may be chosen. Every failing one gives its reason.

Stages look at data only: the kernel's record, the request, the device, the inventory and the policy. None of them
stops the others, so that a user who mends one reason is not surprised by the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halocline.hal.device import Device
from halocline.hal.inventory import Inventory
from halocline.hal.op import Determinism, KernelSpec, Status
from halocline.hal.providers import choose_provider, provider_problem
from halocline.hal.request import KernelRequest
from halocline.hal.versions import satisfies

if TYPE_CHECKING:
    from halocline.hal.overrides import Override

__all__ = ["REFERENCE", "STAGES", "Policy", "rank_on", "reasons_against", "status_on"]

REFERENCE = "reference"

# In the order in which reasons are listed. `override` and `rank` are added by selection.
STAGES = (
    "known_bad",
    "vendor",
    "arch",
    "features",
    "formats",
    "semantics",
    "traits",
    "determinism",
    "graphs",
    "status",
    "package",
    "policy",
    "override",
    "rank",
)

_DETERMINISM: tuple[Determinism, ...] = ("none", "run", "batch")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the user wants of every kernel.

    Attributes:
        overrides: From every source.
        notes: About the overrides, for the table.
        determinism: The least that a kernel must promise.
        graphs: Whether decode is captured, so that kernels must be valid under capture and replay.
        planned: Whether kernels whose target is still to come take part: in explanations, never in a run.
    """

    overrides: tuple[Override, ...] = ()
    notes: tuple[str, ...] = ()
    determinism: Determinism = "none"
    graphs: bool = False
    planned: bool = False


def status_on(spec: KernelSpec, arch: str) -> Status:
    """What is known of a kernel on an architecture; one that its record does not name was never run there."""
    return spec.status if isinstance(spec.status, str) else spec.status.get(arch, "not_run")


def rank_on(spec: KernelSpec, arch: str) -> int:
    """Preference of a kernel on an architecture; one that its record does not name has rank 0."""
    return spec.rank if isinstance(spec.rank, int) else spec.rank.get(arch, 0)


def reasons_against(
    spec: KernelSpec, request: KernelRequest, device: Device, inventory: Inventory, policy: Policy
) -> Iterator[tuple[str, str]]:
    """Yields (stage, reason) for everything that speaks against a kernel."""
    yield from (("known_bad", reason) for reason in _known_bad(spec, device, inventory))
    if spec.vendor and spec.vendor != device.vendor:
        yield "vendor", f"serves {spec.vendor}, the device is {device.vendor}"
    if spec.archs and device.arch not in spec.archs:
        yield "arch", f"needs {_any_of(spec.archs)}, found {device.arch}"
    yield from (("features", reason) for reason in _features(spec, device))
    yield from (("formats", reason) for reason in _unmet("format", request.formats, spec.formats))
    yield from (("semantics", reason) for reason in _unmet("meaning", request.semantics, spec.semantics))
    yield from (("traits", reason) for reason in _traits(spec, request))
    if _DETERMINISM.index(spec.deterministic) < _DETERMINISM.index(policy.determinism):
        wanted = {"run": "the same bits in every run", "batch": "the same bits in any batch"}[policy.determinism]
        yield "determinism", f"does not give {wanted} (it states {spec.deterministic})"
    if policy.graphs and not spec.graph_safe:
        yield "graphs", "not valid under graph capture and replay"
    if status_on(spec, device.arch) == "planned" and not policy.planned:
        yield "status", f"planned: {spec.target} is still to come"
    _, problems = choose_provider(spec.providers, inventory)
    yield from (("package", problem) for problem in problems)
    for provider in spec.requires:
        problem = provider_problem(provider, inventory)
        if problem is not None:
            yield "package", problem
    if spec.name == REFERENCE and device.is_gpu:
        yield "policy", "never chosen on a GPU unless named"


def _known_bad(spec: KernelSpec, device: Device, inventory: Inventory) -> Iterator[str]:
    for bad in spec.known_bad:
        if bad.archs and device.arch not in bad.archs:
            continue
        if bad.versions:
            installed = [found for p in spec.providers if (found := inventory.find(p.distribution)) is not None]
            hit = next((found for found in installed if satisfies(found.version, bad.versions)), None)
            if hit is None:
                continue
            yield f"known to be wrong with {hit.distribution} {hit.version}: {bad.reason} ({bad.source})"
        else:
            where = f" on {device.arch}" if bad.archs else ""
            yield f"known to be wrong{where}: {bad.reason} ({bad.source})"


def _features(spec: KernelSpec, device: Device) -> Iterator[str]:
    for feature in spec.features:
        name, at_least, amount = feature.partition(">=")
        if at_least:
            found = getattr(device, name)
            if found < int(amount):
                yield f"needs {name.replace('_', ' ')} of {int(amount):,} bytes, {device.arch} has {found:,}"
        elif feature not in device.features:
            yield f"needs {feature}, {device.arch} has {' '.join(sorted(device.features)) or 'none of the features'}"


def _unmet(kind: str, asked: Mapping[str, Sequence[str]], taken: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name, values in asked.items():
        if name not in taken:
            yield f"states no {kind} of {name}, {'+'.join(values)} is asked for"
            continue
        missing = [value for value in values if value not in taken[name]]
        if missing:
            yield f"{name}={'+'.join(missing)} is asked for, it takes {_any_of(taken[name])}"


def _traits(spec: KernelSpec, request: KernelRequest) -> Iterator[str]:
    for name, allowed in spec.traits.items():
        if name not in request.traits:
            yield f"depends on {name}, which the model does not state"
        elif request.traits[name] not in allowed:
            yield f"{name}={request.traits[name]} is asked for, it takes {_any_of([str(v) for v in allowed])}"


def _any_of(values: Sequence[str]) -> str:
    if len(values) > 8:
        return f"{values[0]} to {values[-1]}"
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)
