"""Kernels outside of a run: one op on its test inputs, or a recorded call on another kernel.

A kernel is bound for an op alone, so only what does not depend on a model can refuse it: known faults, vendor,
architecture, features, status and packages, and that there is one process. Every other op of a case is served by the
reference.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from halocline.hal.backend import Manifest, specs_of
from halocline.hal.call_outputs import Difference, differences
from halocline.hal.device import Device
from halocline.hal.errors import InputError, NoKernelError, OverrideError, lines
from halocline.hal.inventory import Inventory
from halocline.hal.op import KernelSpec
from halocline.hal.ops import Ops, find_op
from halocline.hal.providers import choose_provider
from halocline.hal.record import Call, recorded_op, replay
from halocline.hal.request import KernelRequest
from halocline.hal.runtime import has_prepare, load_kernel, load_prepare, prepare_name
from halocline.hal.settings import nearest
from halocline.hal.stages import REFERENCE, Policy, rank_on, reasons_against, status_on
from halocline.hal.table import Bound

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Case", "CaseResult", "Workbench", "inputs_for", "load_cases", "needs_several_ranks", "takes"]

# Stages that a model's request has no part in.
_ALONE = ("known_bad", "vendor", "arch", "features", "status", "package")
_SEVERAL_RANKS = "needs several ranks, and ops are tried in one process"


class Case(Protocol):
    """One input of an op; see the reference backend."""

    op: str
    name: str
    dtype: str
    run: Callable[[Ops, str], Mapping[str, Tensor]]
    formats: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Two kernels on one input.

    Attributes:
        case: Name of the input.
        dtype: Element type.
        outputs: How far each output of the first is from the second's.
    """

    case: str
    dtype: str
    outputs: tuple[Difference, ...]

    @property
    def within(self) -> bool:
        """Whether the op's tolerance holds for every output."""
        return all(output.within for output in self.outputs)


def load_cases(manifests: Iterable[Manifest], op: str) -> list[Case]:
    """The inputs of an op, from every backend that brings inputs for its family.

    Raises:
        InputError: If there are none.
    """
    family = op.partition(".")[0]
    found: list[Case] = []
    for manifest in manifests:
        if manifest.cases:
            module, _, attribute = manifest.cases.format(family=family).partition(":")
            if importlib.util.find_spec(module) is not None:
                found.extend(getattr(importlib.import_module(module), attribute)())
    cases = [case for case in found if case.op == op]
    if not cases:
        raise InputError(lines(f"there are no test inputs for {op}", try_="halocline record, then halocline replay"))
    return cases


def takes(spec: KernelSpec, case: Case) -> bool:
    """Whether a kernel states every format, meaning and trait of an input. Inputs may leave the last two out."""
    semantics: Mapping[str, str] = getattr(case, "semantics", {})
    traits: Mapping[str, object] = getattr(case, "traits", {})
    return (
        all(value in spec.formats.get(role, (value,)) for role, value in case.formats.items())
        and all(value in spec.semantics.get(name, ()) for name, value in semantics.items())
        and all(traits[name] in allowed for name, allowed in spec.traits.items() if name in traits)
    )


def needs_several_ranks(spec: KernelSpec) -> bool:
    """Whether a kernel serves groups of several processes alone: no input of one process is for it."""
    return 1 not in spec.traits.get("world_size", (1,))


def inputs_for(bench: Workbench, op: str) -> list[Case]:
    """The inputs of an op that this device can afford: a CPU is spared those of a released model's size."""
    cases = load_cases(bench.manifests, op)
    return [case for case in cases if bench.device.is_gpu or getattr(case, "size", "small") == "small"]


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """Kernels, device and packages with which ops are tried alone.

    Attributes:
        manifests: Every backend.
        device: What to run on.
        inventory: What is installed.
    """

    manifests: tuple[Manifest, ...]
    device: Device
    inventory: Inventory

    def candidates(self, op: str) -> list[KernelSpec]:
        """The kernels of an op, best first on this device.

        Raises:
            OverrideError: If there is no such op.
        """
        specs = specs_of(self.manifests)
        found = [spec for spec in specs if spec.op == op]
        if not found:
            known = sorted({spec.op for spec in specs})
            raise OverrideError(lines(f"unknown op {op!r}", nearest=nearest(op, known), known=", ".join(known)))
        return sorted(found, key=lambda spec: (rank_on(spec, self.device.arch), spec.name), reverse=True)

    def against(self, spec: KernelSpec) -> list[str]:
        """What speaks against a kernel here, whatever the model."""
        request = KernelRequest(op=spec.op)
        found = reasons_against(spec, request, self.device, self.inventory, Policy())
        reasons = [reason for stage, reason in found if stage in _ALONE]
        return [*reasons, _SEVERAL_RANKS] if needs_several_ranks(spec) else reasons

    def for_several_ranks(self, op: str) -> list[KernelSpec]:
        """The kernels of an op that could run on this device, but not in one process."""
        return [spec for spec in self.candidates(op) if self.against(spec) == [_SEVERAL_RANKS]]

    def bind(self, op: str, kernel: str | None) -> Bound:
        """A kernel by name, or the best one but the reference.

        Raises:
            NoKernelError: If it cannot run here, with every reason.
            OverrideError: If there is no such op or kernel.
        """
        candidates = self.candidates(op)
        own = [spec for spec in candidates if spec.vendor in ("", self.device.vendor)]
        if kernel is None:
            wanted = [spec for spec in own if spec.name != REFERENCE and not self.against(spec)]
            if not wanted:
                raise self._refused(op, "any kernel but the reference", candidates)
            return self._bound(wanted[0])
        named = [spec for spec in own if spec.name == kernel] or [spec for spec in candidates if spec.name == kernel]
        if not named:
            known = sorted({spec.name for spec in candidates})
            raise OverrideError(
                lines(f"unknown kernel {kernel!r} of {op}", nearest=nearest(kernel, known), known=", ".join(known))
            )
        if self.against(named[0]):
            raise self._refused(op, kernel, named)
        return self._bound(named[0])

    def ops(self, bound: Bound) -> Ops:
        """Every op by the reference, but this one."""
        kernels: dict[str, Callable[..., Any]] = {}
        for spec in specs_of(self.manifests):
            if spec.name == REFERENCE:
                kernels.update(_loaded(self._bound(spec)))
        kernels.update(_loaded(bound))
        return Ops(kernels)

    def compare(self, first: Bound, second: Bound) -> Iterator[CaseResult]:
        """Runs both kernels on every input that both take."""
        op = find_op(first.spec.op)
        if op is None:
            raise AssertionError(first.spec.op)
        ours, theirs = self.ops(first), self.ops(second)
        for case in inputs_for(self, op.name):
            if not all(takes(bound.spec, case) for bound in (first, second)):
                continue
            found = case.run(ours, self.device.torch_device)
            expected = case.run(theirs, self.device.torch_device)
            yield CaseResult(case=case.name, dtype=case.dtype, outputs=differences(op, found, expected, case.dtype))

    def replay(self, path: Path, kernel: str) -> tuple[Call, tuple[Difference, ...]]:
        """Runs a recorded call on a kernel of this machine."""
        op = recorded_op(path)
        bound = self.bind(op, kernel)
        reader = self.bind("kv_cache.read_rows", REFERENCE)
        return replay(
            path,
            load_kernel(bound),
            prepare=load_prepare(bound) if has_prepare(op) else None,
            read_rows=load_kernel(reader),
            device=self.device.torch_device,
        )

    def _bound(self, spec: KernelSpec) -> Bound:
        provider, _ = choose_provider(spec.providers, self.inventory)
        package = None if provider is None else self.inventory.find(provider.distribution)
        return Bound(
            spec=spec,
            provider=provider,
            version="" if package is None else package.version,
            status=status_on(spec, self.device.arch),
        )

    def _refused(self, op: str, asked: str, specs: Sequence[KernelSpec]) -> NoKernelError:
        reasons = {f"{spec.vendor or 'any'}/{spec.name}": "; ".join(self.against(spec)) for spec in specs}
        rows = {name: reason for name, reason in reasons.items() if reason}
        return NoKernelError(lines(f"{op}: {asked} cannot run on {self.device}", **rows))


def _loaded(bound: Bound) -> dict[str, Callable[..., Any]]:
    op = bound.spec.op
    return {op: load_kernel(bound), **({prepare_name(op): load_prepare(bound)} if has_prepare(op) else {})}
