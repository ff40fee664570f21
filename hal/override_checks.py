"""Checks of overrides against the ops, kernels, traits and layers that exist, before anything is chosen."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from halocline.hal.errors import OverrideError, lines
from halocline.hal.op import KernelSpec
from halocline.hal.ops import all_ops
from halocline.hal.overrides import AUTO, Override
from halocline.hal.request import KernelRequest, layers_of
from halocline.hal.settings import nearest

__all__ = ["check_overrides"]


def check_overrides(
    overrides: Sequence[Override], specs: Sequence[KernelSpec], requests: Sequence[KernelRequest]
) -> tuple[str, ...]:
    """Refuses overrides that name what does not exist, or that contradict each other.

    Returns:
        Notes: ops that a pattern does not reach, overrides that this model has no use for.

    Raises:
        OverrideError: On an unknown op, kernel, trait or layer, or two different choices of equal weight.
    """
    op_names = sorted({op.name for op in all_ops()} | {spec.op for spec in specs})
    notes: list[str] = []
    for override in overrides:
        matched = [name for name in op_names if fnmatch.fnmatchcase(name, override.pattern)]
        if not matched:
            raise _unknown("op", override.pattern, op_names, override)
        for kernel in override.kernels:
            if kernel != AUTO:
                notes.extend(_check_kernel(override, kernel, matched, specs, {request.op for request in requests}))
        if AUTO in override.kernels and override.action != "compare":
            raise _wrong(override, "auto stands for a kernel in compare(auto,...) only", "leave the override out")
        _check_traits(override, matched, specs, requests)
        _check_layers(override, layers_of(requests))
        if not any(fnmatch.fnmatchcase(request.op, override.pattern) for request in requests):
            notes.append(f"{override.text}: the model does not use {override.pattern}")
    _check_conflicts(overrides)
    return tuple(dict.fromkeys(notes))


def _check_kernel(
    override: Override, kernel: str, matched: Sequence[str], specs: Sequence[KernelSpec], requested: AbstractSet[str]
) -> Iterable[str]:
    having = {spec.op for spec in specs if spec.name == kernel}
    if not having.intersection(matched):
        known = sorted({spec.name for spec in specs if spec.op in matched})
        raise _unknown("kernel", kernel, known, override)
    without = [name for name in matched if name in requested and name not in having]
    if without and override.is_pattern and override.action != "ban":
        yield f"{override.text}: no such kernel for {', '.join(without)}, which keep their choice"


def _check_traits(
    override: Override, matched: Sequence[str], specs: Sequence[KernelSpec], requests: Sequence[KernelRequest]
) -> None:
    known = {name for spec in specs if spec.op in matched for name in spec.traits}
    known |= {name for request in requests if request.op in matched for name in request.traits}
    for name, value in override.traits.items():
        if name not in known:
            raise _unknown("trait", name, sorted(known), override)
        values = {str(v) for spec in specs if spec.op in matched for v in spec.traits.get(name, ())}
        values |= {str(r.traits[name]) for r in requests if r.op in matched and name in r.traits}
        if value not in values:
            raise _unknown(f"value of {name}", value, sorted(values), override)


def _check_layers(override: Override, layers: Sequence[int]) -> None:
    if override.layers is None or not layers:
        return
    beyond = [layer for layer in override.layers if layer > layers[-1]]
    if beyond:
        raise _wrong(
            override,
            f"the model's layers are 0 to {layers[-1]}, asked for layer {beyond[0]}",
            f"layers within 0-{layers[-1]}",
        )


def _check_conflicts(overrides: Sequence[Override]) -> None:
    choices = [override for override in overrides if override.action != "ban"]
    for number, first in enumerate(choices):
        for second in choices[number + 1 :]:
            same_reach = (first.pattern, dict(first.traits)) == (second.pattern, dict(second.traits))
            if first.weight != second.weight or not same_reach:
                continue
            meet = first.layers is None or set(first.layers).intersection(second.layers or ())
            if meet and (first.action, first.kernels) != (second.action, second.kernels):
                raise _wrong(second, f"{first.text} was given, too ({first.origin})", "keep one of the two")


def _unknown(kind: str, word: str, known: Sequence[str], override: Override) -> OverrideError:
    close = nearest(word, known)
    return OverrideError(
        lines(
            f"unknown {kind} {word!r} in the kernel override {override.text!r}",
            given=override.origin,
            nearest=close,
            known=", ".join(known) or "none",
            try_=override.text.replace(word, close) if close else "one of the known names",
        )
    )


def _wrong(override: Override, found: str, remedy: str) -> OverrideError:
    return OverrideError(
        lines(f"impossible kernel override {override.text!r}", given=override.origin, found=found, try_=remedy)
    )
