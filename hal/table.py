"""KernelTable: the outcome of binding. One per process, frozen, logged once, the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from halocline.hal.device import Device
from halocline.hal.errors import ConfigError
from halocline.hal.op import KernelSpec, Provider, Status
from halocline.hal.request import KernelRequest

if TYPE_CHECKING:
    from halocline.hal.ops.attention import PrefillLayout
    from halocline.hal.watch import Watch

__all__ = ["Binding", "Bound", "KernelTable", "Rejection", "Source", "layer_text"]

Source = Literal["flag", "env", "file", "model", "device"]


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """One reason against one kernel.

    Attributes:
        kernel: Its name; `vendor/name` for another vendor's kernel when several have that name.
        stage: What refused it.
        reason: Why, in one line.
    """

    kernel: str
    stage: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A chosen kernel.

    Attributes:
        spec: Its record.
        provider: Where its library comes from, or None when it needs none.
        version: The provider's installed version, or empty.
        status: What is known of it on this architecture.
    """

    spec: KernelSpec
    provider: Provider | None
    version: str
    status: Status


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The kernel that serves one request in some layers.

    Attributes:
        request: What was asked.
        layers: Layers concerned; None means outside of layers and wherever no other binding of the op applies.
        kernels: One kernel; two when the second is compared with the first; none when no kernel covers the request.
        source: Who chose: a flag, the environment, a file, the model's or the device's default.
        rejected: Every reason against every other kernel.
    """

    request: KernelRequest
    layers: tuple[int, ...] | None
    kernels: tuple[Bound, ...]
    source: Source
    rejected: tuple[Rejection, ...]

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.request.op

    @property
    def chosen(self) -> str | None:
        """Name of the kernel, `compare(a,b)`, or None."""
        names = [bound.spec.name for bound in self.kernels]
        return f"compare({','.join(names)})" if len(names) > 1 else next(iter(names), None)

    @property
    def status(self) -> Status | None:
        """The least proven status of the kernels; None where there is no kernel."""
        found = {bound.status for bound in self.kernels}
        order: tuple[Status, ...] = ("planned", "not_run", "run")
        return next((status for status in order if status in found), None)


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Which kernel serves each op.

    Attributes:
        device: What it was chosen for.
        bindings: By op, then layer.
        notes: Things the user should know about the choice: overrides without effect, preferences not honoured.
        watch: What looks at the run from beside it; no part of the choice.
    """

    device: Device
    bindings: tuple[Binding, ...]
    notes: tuple[str, ...] = ()
    watch: Watch | None = field(default=None, compare=False, repr=False)

    def find(self, op: str, layer: int | None = None) -> Binding:
        """The binding of an op in a layer, or outside of layers.

        Raises:
            ConfigError: If the model that asked for this table did not request the op there.
        """
        found = [binding for binding in self.bindings if binding.op == op]
        for binding in found:
            if layer is not None and layer in (binding.layers or ()):
                return binding
        for binding in found:
            if binding.layers is None:
                return binding
        where = "outside of layers" if layer is None else f"in layer {layer}"
        raise ConfigError(f"{op} was not requested {where}; the model's requests must name every op that it calls")

    def ops(self, layer: int | None = None) -> tuple[str, ...]:
        """Names of the ops that are bound in a layer, or outside of layers."""
        names = dict.fromkeys(
            binding.op for binding in self.bindings if binding.layers is None or layer in binding.layers
        )
        return tuple(names)

    @property
    def compared(self) -> tuple[str, ...]:
        """Ops that run in comparison mode."""
        return tuple(dict.fromkeys(binding.op for binding in self.bindings if len(binding.kernels) > 1))

    @property
    def libraries(self) -> frozenset[str]:
        """Modules of the libraries that the chosen kernels are called from."""
        bound = [kernel for binding in self.bindings for kernel in binding.kernels]
        chosen = {kernel.provider.module for kernel in bound if kernel.provider is not None}
        return frozenset(chosen | {provider.module for kernel in bound for provider in kernel.spec.requires})

    @property
    def prefill_layout(self) -> PrefillLayout:
        """The layout of prefill that the requests state, for attention plans; paged when they state none."""
        stated = (b.request.traits.get("prefill_layout") for b in self.bindings)
        return "ragged" if "ragged" in stated else "paged"

    @property
    def digest(self) -> str:
        """Short hash of every choice; ranks exchange it and stop on a mismatch."""
        rows = [
            [
                binding.op,
                None if binding.layers is None else list(binding.layers),
                sorted((name, str(value)) for name, value in binding.request.traits.items()),
                [[bound.spec.name, bound.spec.target, bound.version] for bound in binding.kernels],
            ]
            for binding in self.bindings
        ]
        text = json.dumps([self.device.vendor, self.device.arch, rows], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def summary(self) -> str:
        """The one line that is logged at start-up."""
        counts: dict[str, int] = {}
        for op in dict.fromkeys(binding.op for binding in self.bindings):
            for name in dict.fromkeys(b.chosen or "none" for b in self.bindings if b.op == op):
                counts[name] = counts.get(name, 0) + 1
        parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda kv: (-kv[1], kv[0])))
        return f"kernels {self.digest} on {self.device}: {parts}"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each op and group of layers with the same outcome, as `explain --json` prints it."""
        groups: dict[str, dict[str, tuple[list[int], dict[str, Any]]]] = {}
        for binding in self.bindings:
            row = {
                "op": binding.op,
                "chosen": binding.chosen,
                "source": binding.source,
                "status": binding.status,
                "rejected": [{"kernel": r.kernel, "stage": r.stage, "reason": r.reason} for r in binding.rejected],
            }
            layers, _ = groups.setdefault(binding.op, {}).setdefault(json.dumps(row), ([], row))
            layers.extend(binding.layers or ())
        rows: list[dict[str, Any]] = []
        for outcomes in groups.values():
            for layers, row in outcomes.values():
                rows.append({**row, "layers": layer_text(layers)} if len(outcomes) > 1 else row)
        return rows


def layer_text(layers: Sequence[int]) -> str:
    """Layers as ranges: `0-3,7`; `other` for the rest of a model."""
    if not layers:
        return "other"
    ordered = sorted(set(layers))
    ranges: list[list[int]] = []
    for layer in ordered:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1][1:] = [layer]
        else:
            ranges.append([layer])
    return ",".join("-".join(map(str, pair)) for pair in ranges)
