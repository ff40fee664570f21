"""Op: a named contract. KernelSpec: a record that says where a kernel lives and when it applies.

An op is declared once, in `hal/ops/<family>.py`, by the `op` decorator around a signature with a docstring and
no body. A kernel is a function of the same signature, marked with `implements`. Nothing registers itself:
manifests are plain data (`KernelSpec`), read without importing torch or any kernel library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar

__all__ = [
    "KernelSpec",
    "KnownBad",
    "Op",
    "Provider",
    "Tolerance",
    "implements",
    "op",
]

P = ParamSpec("P")
R = TypeVar("R")

Determinism = Literal["none", "run", "batch"]
Status = Literal["run", "not_run", "planned"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a kernel may be from the reference, and why.

    Attributes:
        atol: Absolute bound per element where the reference's root mean square is at most 1. It grows with a larger
            one, because what cancels in a sum is as large as its terms.
        rtol: Bound relative to the reference's magnitude per element.
        norm: Bound on the norm of the difference over the norm of the reference.
        reason: Where the size comes from.
    """

    atol: float
    rtol: float
    norm: float
    reason: str


class Op(Generic[P, R]):
    """A contract: name, signature, specification, tolerance and invariants.

    Calling an op is a mistake (it has no body); models call the bound kernels of an `Ops` table, which have
    the type of the contract.

    Attributes:
        name: `family.op`, the name used in overrides, tables and logs.
        tolerances: Bounds by element type of the op's main input: `float32`, `bfloat16`.
        semantics: Names of the numeric meanings that a request states and a kernel must match.
        mutates: Parameters that are written in place.
        graph_safe: Whether every kernel of the op must be valid under graph capture and replay.
        batch_invariant: Whether the reference gives a row the same bits whatever else is in the batch. Products of
            the CPU's libraries round differently with the number of rows.
        prepare: Contract of the load-time conversion of this op's weights, if it has one.
    """

    def __init__(
        self,
        contract: Callable[P, R],
        *,
        family: str,
        tolerances: Mapping[str, Tolerance],
        semantics: tuple[str, ...],
        mutates: tuple[str, ...],
        graph_safe: bool,
        batch_invariant: bool,
        prepare: Op[..., Any] | None,
    ) -> None:
        self.contract = contract
        self.family = family
        self.name = f"{family}.{contract.__name__}"
        self.tolerances = tolerances
        self.semantics = semantics
        self.mutates = mutates
        self.graph_safe = graph_safe
        self.batch_invariant = batch_invariant
        self.prepare = prepare
        self.__doc__ = contract.__doc__
        self.__name__ = contract.__name__

    @property
    def signature(self) -> inspect.Signature:
        """Parameters and return type of the contract."""
        return inspect.signature(self.contract)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Present for its type only."""
        raise AssertionError(f"{self.name} is a contract: call the kernel that was bound to it")

    def __repr__(self) -> str:
        return f"Op({self.name})"


def op(
    family: str,
    *,
    tolerances: Mapping[str, Tolerance] | None = None,
    semantics: tuple[str, ...] = (),
    mutates: tuple[str, ...] = (),
    graph_safe: bool = True,
    batch_invariant: bool = True,
    prepare: Op[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares the decorated signature as an op of `family`; see `Op` for the arguments."""

    def declare(contract: Callable[P, R]) -> Op[P, R]:
        return Op(
            contract,
            family=family,
            tolerances=tolerances or {},
            semantics=semantics,
            mutates=mutates,
            graph_safe=graph_safe,
            batch_invariant=batch_invariant,
            prepare=prepare,
        )

    return declare


def implements(contract: Op[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a function as a kernel of `contract`; type checkers reject a signature that drifted."""

    def mark(kernel: Callable[P, R]) -> Callable[P, R]:
        kernel.__halocline_op__ = contract.name  # type: ignore[attr-defined]
        return kernel

    return mark


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A distribution in which a kernel's library may live.

    Attributes:
        distribution: Name in package metadata, for example `sglang-kernel`.
        versions: PEP 440 specifier that was tried, for example `>=0.4.3,<0.5`.
        module: Top-level module that the distribution must own, for example `sgl_kernel`.
    """

    distribution: str
    versions: str
    module: str


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """A combination on which a kernel is known to be wrong.

    Attributes:
        reason: What goes wrong, in one line.
        source: The public thread that reports it.
        archs: Architectures concerned; empty means all.
        versions: PEP 440 specifier of the provider's versions concerned; empty means all.
    """

    reason: str
    source: str
    archs: tuple[str, ...] = ()
    versions: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel, as data.

    Attributes:
        op: `family.op` that it implements.
        name: The library or origin, as typed in overrides: `flashmla`, `triton`, `reference`.
        target: `package.module:function` of our wrapper, imported when bound, never before.
        prepare: `package.module:function` of the load-time weight conversion, for ops that have one.
        providers: Where its library may live, in order of preference; empty means nothing is needed.
        requires: Further libraries, all of which it needs.
        vendor: `nvidia`, `amd` or `cpu`; empty means any.
        archs: Architectures it runs on (`sm_90`, `gfx942`); empty means every one of the vendor.
        features: Device features it needs, for example `fp8_ocp`.
        formats: Values it takes for each format that a request states, for example
            `{"weight": ("mxfp4",), "cache": ("fp8_block64",)}`.
        traits: Values it takes for each trait that a request states, for example `{"a2a": ("none",)}`;
            a trait that is not named is not restricted.
        semantics: Values it honours for each semantic that its op demands. One left out rejects the kernel.
        graph_safe: Valid under capture and replay.
        deterministic: `none`, `run` (same bits for the same batch) or `batch` (for any batch).
        rank: Preference, higher wins: reference 0, portable 20, library 60, tuned 80. May differ by arch.
        known_bad: Combinations that are refused, each with its public thread.
        workspace: One line on the scratch memory it takes; empty means none.
        jit: Compiles at first use, so it must be warmed before capture.
        status: `run` = executed on such a device by us, `not_run` = written but never executed there,
            `planned` = its target is still to come. May differ by arch.
    """

    op: str
    name: str
    target: str
    prepare: str = ""
    providers: tuple[Provider, ...] = ()
    requires: tuple[Provider, ...] = ()
    vendor: str = ""
    archs: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    formats: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    traits: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])
    semantics: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    graph_safe: bool = True
    deterministic: Determinism = "run"
    rank: int | Mapping[str, int] = 0
    known_bad: tuple[KnownBad, ...] = ()
    workspace: str = ""
    jit: bool = False
    status: Status | Mapping[str, Status] = "run"
