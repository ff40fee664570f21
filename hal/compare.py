"""Comparison mode: two resolved kernels on the same inputs; the first one's result counts.

The pair is made of functions that were loaded already, so that nothing is looked up while it runs and a comparison
cannot contain another. Differences are kept for each op and layer with the step; the inputs of an op's first
divergence are written as a record that `halocline replay` reproduces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halocline.hal.call_outputs import Difference, ReadRows, comparable, differences, differing_pages
from halocline.hal.call_values import Prepared, bind_arguments, clone
from halocline.hal.errors import InputError, lines
from halocline.hal.op import Op
from halocline.hal.record import Call, dtype_of, save_call

__all__ = ["Compared", "Comparison", "Named", "is_capturing"]

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Named:
    """A loaded kernel under its name."""

    name: str
    run: Kernel


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One compared call.

    Attributes:
        op: `family.op`.
        layer: Its layer, or None outside of layers.
        step: Step of the run.
        first: Kernel whose result was returned.
        second: Kernel that it was compared with.
        outputs: How far each output of the first is from the second's.
        dump: Record of the inputs, for the first divergence of an op.
    """

    op: str
    layer: int | None
    step: int
    first: str
    second: str
    outputs: tuple[Difference, ...]
    dump: Path | None

    @property
    def diverged(self) -> bool:
        """Whether some output is out of the op's tolerance."""
        return any(not output.within for output in self.outputs)

    @property
    def largest(self) -> Difference:
        """The output with the largest difference."""
        return max(self.outputs, key=lambda output: (not output.within, output.max_abs))


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Comparison:
    """The comparisons of one run.

    Attributes:
        folder: Where inputs of divergences are written.
        step: Step of the run.
        active: Whether calls are compared; otherwise the first kernel runs alone.
        worst: By op and layer, the compared call with the largest difference.
        diverged: Calls out of tolerance, in order, up to a limit.
        num_calls: Calls compared so far.
    """

    def __init__(self, folder: Path, *, capturing: Callable[[], bool] = is_capturing, limit: int = 1000) -> None:
        self.folder = folder
        self.step = 0
        self.active = True
        self.worst: dict[tuple[str, int | None], Compared] = {}
        self.diverged: list[Compared] = []
        self.num_calls = 0
        self._capturing = capturing
        self._limit = limit
        self._dumped: set[str] = set()

    def prepare(self, op: Op[..., Any], first: Kernel, second: Kernel) -> Kernel:
        """The load-time conversion of a compared op: each kernel converts for itself."""
        contract = op.prepare
        if contract is None:
            raise AssertionError(f"{op.name} has no load-time conversion")

        def converting(*args: Any, **kwargs: Any) -> Prepared:
            arguments = bind_arguments(contract, args, kwargs)
            return Prepared(op=op.name, arguments=arguments, forms=(first(**arguments), second(**arguments)))

        return converting

    def kernel(
        self, op: Op[..., Any], layer: int | None, first: Named, second: Named, read_rows: ReadRows | None
    ) -> Kernel:
        """A function with the op's signature that runs both kernels and returns the first one's result.

        Raises:
            AssertionError: If one of them is itself a comparison.
        """
        for named in (first, second):
            if getattr(named.run, "__halocline_compared__", False):
                raise AssertionError(f"{op.name}: a comparison cannot contain another")

        def compared(*args: Any, **kwargs: Any) -> Any:
            if self._capturing():
                raise _in_capture(op.name, first.name, second.name)
            arguments = bind_arguments(op, args, kwargs)
            if not self.active:
                return first.run(**_for_kernel(arguments, 0))
            return self._run(op, layer, first, second, arguments, read_rows)

        compared.__halocline_compared__ = True  # type: ignore[attr-defined]
        return compared

    def _run(
        self,
        op: Op[..., Any],
        layer: int | None,
        first: Named,
        second: Named,
        arguments: Mapping[str, Any],
        read_rows: ReadRows | None,
    ) -> Any:
        written = (*op.mutates, *(("x_TD",) if op.family == "collective" else ()))
        before = {name: clone(arguments[name]) for name in written}
        ours = _for_kernel(arguments, 0)
        theirs = {**_for_kernel(arguments, 1), **{name: clone(value) for name, value in before.items()}}
        if "reuse" in theirs:
            theirs["reuse"] = None  # a plan belongs to the kernel that made it
        other = second.run(**theirs)
        result = first.run(**ours)
        pages = differing_pages(op, ours, theirs)
        found = comparable(op, ours, result, read_rows=read_rows, pages=pages)
        expected = comparable(op, theirs, other, read_rows=read_rows, pages=pages)
        compared = Compared(
            op=op.name,
            layer=layer,
            step=self.step,
            first=first.name,
            second=second.name,
            outputs=differences(op, found, expected, dtype_of(arguments)),
            dump=None,
        )
        if compared.diverged and op.name not in self._dumped:
            call = Call(
                op=op.name,
                kernel=second.name,
                layer=layer,
                step=self.step,
                arguments={**arguments, **before},
                outputs=comparable(op, theirs, other, read_rows=read_rows),
            )
            compared = self._dump(compared, call)
        self._note(compared)
        return result

    def _dump(self, compared: Compared, call: Call) -> Compared:
        """Writes the inputs of an op's first divergence and says so."""
        self._dumped.add(call.op)
        where = "x" if call.layer is None else str(call.layer)
        dump = self.folder / f"divergence-{call.op}-layer{where}-step{call.step}.safetensors"
        save_call(dump, call)
        worst = compared.largest
        logger.warning(
            "%s differs in layer %s, step %d: %s against %s, %s: max abs %.3g, cosine %.6f; inputs in %s",
            call.op, call.layer, call.step, compared.first, compared.second, worst.output, worst.max_abs, worst.cosine,
            dump,
        )  # fmt: skip
        return replace(compared, dump=dump)

    def _note(self, compared: Compared) -> None:
        self.num_calls += 1
        if compared.diverged and len(self.diverged) < self._limit:
            self.diverged.append(compared)
        key = (compared.op, compared.layer)
        known = self.worst.get(key)
        if compared.outputs and (known is None or compared.largest.max_abs > known.largest.max_abs):
            self.worst[key] = compared


def _for_kernel(arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Arguments with each weight in the form that one of the kernels made of it."""
    return {
        name: value.forms[min(number, len(value.forms) - 1)] if isinstance(value, Prepared) else value
        for name, value in arguments.items()
    }


def _in_capture(op: str, first: str, second: str) -> InputError:
    return InputError(
        lines(
            f"compare({first},{second}) of {op} cannot run inside a graph capture",
            found="a step is being captured: what it runs would be replayed without being compared",
            try_="run eagerly, without graphs, or drop the comparison",
        )
    )
