"""KernelRequest: what a model needs of one op, stated before any kernel is looked at.

A model describes itself once as a list of requests (`models/<name>/requests.py`), free of torch. Formats and
semantics hold every value that occurs in the op's calls; a kernel must take all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from halocline.hal.errors import ConfigError
from halocline.hal.ops import find_op

__all__ = ["KernelRequest", "Trait", "check_requests", "layers_of"]

Trait = int | str


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """One op that a model calls, with the facts that a kernel has to suit.

    Attributes:
        op: `family.op`.
        layers: Layers that call it, draft layers counted on behind the main ones; None means outside of layers, and
            in every layer that no other request of the op names.
        formats: By role (`weight`, `compute`), every format that occurs.
        traits: Facts of the deployment, as one rank sees them: `a2a`, `tp_size`, `ep_size`, `world_size`, `num_heads`,
            `head_dim`, `num_experts`, `expert_width`, `prefill_layout`.
        semantics: By name, every numeric meaning that occurs; all that the op demands must be there.
    """

    op: str
    layers: tuple[int, ...] | None = None
    formats: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    traits: Mapping[str, Trait] = field(default_factory=dict[str, Trait])
    semantics: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def __post_init__(self) -> None:
        for name in ("formats", "traits", "semantics"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def asked(self) -> str:
        """The facts on one line, for errors and tables."""
        facts = [f"{name}={value}" for name, value in self.traits.items()]
        facts += [f"{n}={'+'.join(v)}" for group in (self.formats, self.semantics) for n, v in group.items()]
        return " ".join(facts) or "nothing in particular"


def layers_of(requests: Iterable[KernelRequest]) -> tuple[int, ...]:
    """Every layer that some request names, in order."""
    return tuple(sorted({layer for request in requests for layer in request.layers or ()}))


def check_requests(requests: Iterable[KernelRequest]) -> None:
    """Refuses requests that cannot be told apart or leave a numeric meaning open.

    Raises:
        ConfigError: If an op is unknown, a mandatory semantic is not stated, or two requests of one op meet in a layer.
    """
    seen: set[tuple[str, int | None]] = set()
    for request in requests:
        op = find_op(request.op)
        if op is None:
            raise ConfigError(f"a request names the op {request.op!r}, which is no contract in halocline.hal.ops")
        missing = [name for name in op.semantics if not request.semantics.get(name)]
        if missing:
            raise ConfigError(f"the request for {request.op} does not state {', '.join(missing)}")
        for layer in (None,) if request.layers is None else request.layers:
            if (request.op, layer) in seen:
                where = "outside of layers" if layer is None else f"in layer {layer}"
                raise ConfigError(f"two requests for {request.op} {where}")
            seen.add((request.op, layer))
