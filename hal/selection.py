"""bind(): requests x device x inventory x policy -> KernelTable. A pure function of data.

Each candidate passes all stages (`halocline.hal.stages`), overrides speak in order of precedence, and the rest is
decided by rank. Nothing falls back in silence: an explicit choice that cannot be honoured is an error with every
reason, and two kernels of one rank are an error, not a coin toss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from halocline.hal.device import Device
from halocline.hal.errors import NoKernelError, lines
from halocline.hal.inventory import Inventory
from halocline.hal.op import KernelSpec
from halocline.hal.override_checks import check_overrides
from halocline.hal.overrides import AUTO, Override
from halocline.hal.providers import choose_provider
from halocline.hal.request import KernelRequest, check_requests, layers_of
from halocline.hal.stages import REFERENCE, STAGES, Policy, rank_on, reasons_against, status_on
from halocline.hal.table import Binding, Bound, KernelTable, Rejection, Source

__all__ = ["Policy", "bind", "resolve"]


def bind(
    requests: Sequence[KernelRequest],
    *,
    specs: Sequence[KernelSpec],
    device: Device,
    inventory: Inventory,
    policy: Policy | None = None,
) -> KernelTable:
    """Chooses a kernel for every request.

    Args:
        requests: What the model needs.
        specs: Every kernel of every backend, in any order.
        device: What it will run on.
        inventory: What is installed there.
        policy: What the user wants; nothing in particular when left out.

    Raises:
        NoKernelError: If a request has no kernel, an explicit choice cannot be honoured, or two kernels tie.
        OverrideError: If an override names what does not exist.
        ConfigError: If the requests are incomplete or contradict each other.
    """
    table = resolve(requests, specs=specs, device=device, inventory=inventory, policy=policy)
    missing = [binding for binding in table.bindings if not binding.kernels]
    if missing:
        raise _no_kernel(missing, device, policy or Policy())
    return table


def resolve(
    requests: Sequence[KernelRequest],
    *,
    specs: Sequence[KernelSpec],
    device: Device,
    inventory: Inventory,
    policy: Policy | None = None,
) -> KernelTable:
    """As `bind`, but a request without any kernel gives a binding without one: explanations are complete."""
    policy = policy or Policy()
    check_requests(requests)
    notes = [*policy.notes, *check_overrides(policy.overrides, specs, requests)]
    ordered = sorted(specs, key=lambda spec: (spec.op, spec.name, spec.vendor))
    bindings: list[Binding] = []
    for request in sorted(requests, key=lambda r: (r.op, r.layers is not None, r.layers or ())):
        candidates = [spec for spec in ordered if spec.op == request.op]
        judged = _judge(candidates, request, device, inventory, policy)
        for layers, overrides in _groups(request, requests, policy.overrides):
            case = _Case(request, layers, device, inventory, judged, notes)
            bindings.append(case.choose(overrides))
    return KernelTable(device=device, bindings=tuple(bindings), notes=tuple(dict.fromkeys(notes)))


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A kernel with its label and everything that the stages have against it."""

    spec: KernelSpec
    label: str
    against: tuple[tuple[str, str], ...]

    @property
    def hard(self) -> tuple[tuple[str, str], ...]:
        """Reasons that naming the kernel does not lift."""
        return tuple(reason for reason in self.against if reason[0] != "policy")


def _judge(
    specs: Sequence[KernelSpec], request: KernelRequest, device: Device, inventory: Inventory, policy: Policy
) -> tuple[_Candidate, ...]:
    names = [spec.name for spec in specs]
    return tuple(
        _Candidate(
            spec=spec,
            label=spec.name
            if spec.vendor in ("", device.vendor) or names.count(spec.name) == 1
            else f"{spec.vendor}/{spec.name}",
            against=tuple(reasons_against(spec, request, device, inventory, policy)),
        )
        for spec in specs
    )


def _groups(
    request: KernelRequest, requests: Sequence[KernelRequest], overrides: Sequence[Override]
) -> Iterator[tuple[tuple[int, ...] | None, tuple[Override, ...]]]:
    """Splits a request's layers by the overrides that speak about them."""

    def speaking(layer: int | None) -> tuple[Override, ...]:
        return tuple(override for override in overrides if override.matches(request, layer))

    if request.layers is None:
        named = {layer for other in requests if other.op == request.op for layer in other.layers or ()}
        layers = [layer for layer in layers_of(requests) if layer not in named]
        yield None, speaking(None)
    else:
        layers = sorted(request.layers)
    grouped: dict[tuple[str, ...], tuple[list[int], tuple[Override, ...]]] = {}
    for layer in layers:
        found = speaking(layer)
        if request.layers is None and found == speaking(None):
            continue
        grouped.setdefault(tuple(o.text + o.origin for o in found), ([], found))[0].append(layer)
    yield from ((tuple(members), found) for members, found in grouped.values())


@dataclass(frozen=True)
class _Case:
    """One request in one group of layers, with its judged candidates."""

    request: KernelRequest
    layers: tuple[int, ...] | None
    device: Device
    inventory: Inventory
    candidates: tuple[_Candidate, ...]
    notes: list[str] = field(repr=False)

    def choose(self, overrides: Sequence[Override]) -> Binding:
        """Lets overrides speak in order of precedence, then rank."""
        spoken = sorted(overrides, key=lambda o: (o.weight, o.text), reverse=True)
        choices = [o for o in spoken if o.action != "ban" and self._reaches(o)]
        bans = [o for o in spoken if o.action == "ban"]
        for choice in choices:
            banned = {o.kernels[0]: o for o in bans if o.weight > choice.weight}
            hit = next((banned[name] for name in choice.kernels if name in banned), None)
            if hit is not None:
                self.notes.append(f"{choice.text} ({choice.origin}) is overruled by {hit.text} ({hit.origin})")
                continue
            taken = self._honour(choice, bans)
            if taken is not None:
                return self._binding(taken, choice.source, bans, f"{choice.text} ({choice.origin})")
        best = self._best(bans)
        return self._binding([best] if best else [], self._default_source(best, bans), bans, "")

    def _default_source(self, best: _Candidate | None, bans: Sequence[Override]) -> Source:
        """The device decides by rank, unless a ban took a better kernel away."""
        ahead = self._ranked(())
        lost = [ban for ban in bans for c in ahead[: ahead.index(best) if best else None] if c.spec.name in ban.kernels]
        return max(lost, key=lambda ban: ban.weight).source if lost else "device"

    def _reaches(self, override: Override) -> bool:
        """Whether a choice speaks about this op: a pattern only where there are such kernels."""
        if not override.is_pattern:
            return True
        known = {candidate.spec.name for candidate in self.candidates} | {AUTO}
        return all(name in known for name in override.kernels)

    def _honour(self, choice: Override, bans: Sequence[Override]) -> list[_Candidate] | None:
        """The kernels that a choice names; None when it is a preference that cannot be had."""
        names = self._with_auto(choice, bans)
        found = [self._named(name) for name in names]
        problems = [candidate for candidate in found if candidate.hard]
        if not problems:
            return found
        if choice.action != "prefer":
            raise self._refused(choice, problems)
        reasons = "; ".join(reason for candidate in problems for _, reason in candidate.hard)
        self.notes.append(f"{choice.text} ({choice.origin}) falls back for {self.request.op}: {reasons}")
        return None

    def _with_auto(self, choice: Override, bans: Sequence[Override]) -> list[str]:
        if AUTO not in choice.kernels:
            return list(choice.kernels)
        best = self._best(bans)
        if best is None:
            raise self._refused(choice, [])
        names = [best.spec.name if name == AUTO else name for name in choice.kernels]
        if names[0] != names[1]:
            return names
        if names[0] == REFERENCE:
            self.notes.append(f"{choice.text}: {self.request.op} has nothing to be compared with but {REFERENCE}")
            return names[:1]
        self.notes.append(
            f"{choice.text}: {self.request.op} would run {names[0]} anyway and is compared with {REFERENCE}"
        )
        return [names[0], REFERENCE]

    def _named(self, name: str) -> _Candidate:
        """The candidate of a name, this device's own first."""
        found = [candidate for candidate in self.candidates if candidate.spec.name == name]
        own = [candidate for candidate in found if candidate.spec.vendor in ("", self.device.vendor)]
        return (own or found)[0]

    def _ranked(self, bans: Sequence[Override]) -> list[_Candidate]:
        """What the stages and bans leave, best first."""
        banned = {override.kernels[0] for override in bans}
        left = [c for c in self.candidates if not c.against and c.spec.name not in banned]
        return sorted(left, key=self._rank, reverse=True)

    def _best(self, bans: Sequence[Override]) -> _Candidate | None:
        ranked = self._ranked(bans)
        tied = [c.label for c in ranked if self._rank(c) == self._rank(ranked[0])]
        if len(tied) > 1:
            op = self.request.op
            raise NoKernelError(
                lines(
                    f"{len(tied)} kernels of rank {self._rank(ranked[0])} for {op!r} on {self.device}",
                    tied=", ".join(tied),
                    try_=f"--kernel {op}={tied[0]}, and give them different ranks in their manifests",
                )
            )
        return ranked[0] if ranked else None

    def _rank(self, candidate: _Candidate) -> int:
        return rank_on(candidate.spec, self.device.arch)

    def _binding(self, taken: Sequence[_Candidate], source: Source, bans: Sequence[Override], why: str) -> Binding:
        banned = {override.kernels[0]: override for override in reversed(bans)}
        rejected: list[Rejection] = []
        for candidate in self.candidates:
            if candidate in taken:
                continue
            reasons = list(candidate.against)
            if candidate.spec.name in banned:
                ban = banned[candidate.spec.name]
                reasons.append(("override", f"banned by {ban.text} ({ban.origin})"))
            elif why and not reasons:
                reasons.append(("override", f"not the choice of {why}"))
            if not reasons and taken:
                winner = taken[0]
                reasons.append(("rank", f"rank {self._rank(candidate)}, below {self._rank(winner)} of {winner.label}"))
            reasons.sort(key=lambda pair: STAGES.index(pair[0]))
            rejected.extend(Rejection(kernel=candidate.label, stage=stage, reason=text) for stage, text in reasons)
        return Binding(
            request=self.request,
            layers=self.layers,
            kernels=tuple(self._bound(candidate) for candidate in taken),
            source=source,
            rejected=tuple(rejected),
        )

    def _bound(self, candidate: _Candidate) -> Bound:
        provider, _ = choose_provider(candidate.spec.providers, self.inventory)
        package = None if provider is None else self.inventory.find(provider.distribution)
        return Bound(
            spec=candidate.spec,
            provider=provider,
            version="" if package is None else package.version,
            status=status_on(candidate.spec, self.device.arch),
        )

    def _refused(self, choice: Override, problems: Sequence[_Candidate]) -> NoKernelError:
        good = [candidate.spec.name for candidate in self.candidates if not candidate.hard]
        reasons = {candidate.label: "; ".join(reason for _, reason in candidate.hard) for candidate in problems}
        suggestion = f"--kernel {self.request.op}={good[0]}" if good else "another device"
        return NoKernelError(
            lines(
                f"{choice.text} cannot be honoured for {self.request.op!r} on {self.device}",
                given=choice.origin,
                asked=self.request.asked(),
                **reasons,
                possible=", ".join(good) or "none",
                try_=suggestion,
            )
        )


def _no_kernel(missing: Sequence[Binding], device: Device, policy: Policy) -> NoKernelError:
    binding = missing[0]
    reasons: dict[str, list[str]] = {}
    for rejection in binding.rejected:
        reasons.setdefault(rejection.kernel, []).append(rejection.reason)
    rows = {kernel: f"rejected: {'; '.join(found)}" for kernel, found in reasons.items()}
    soft = [kernel for kernel in reasons if {r.stage for r in binding.rejected if r.kernel == kernel} == {"policy"}]
    rows.update({kernel: f"skipped: {reasons[kernel][0]}" for kernel in soft})
    remedy = "a device from the support matrix"
    if soft:
        remedy = f"--kernel {binding.op}={soft[0]} (slow), or {remedy}"
    if policy.determinism == "batch":
        remedy = (
            f"leave --deterministic out: not yet on {device.arch}, no batch-invariant kernel of {binding.op} is there"
        )
    others = ", ".join(dict.fromkeys(other.op for other in missing[1:] if other.op != binding.op))
    return NoKernelError(
        lines(
            f"no kernel for {binding.op!r} on {device}",
            asked=binding.request.asked(),
            **rows,
            also=others or None,
            try_=remedy,
        )
    )
