"""Parity: every kernel that can run here, on every input of its op that it takes, against the reference on the CPU.

Kernels are tried alone, as `halocline.hal.offline` binds them: the other ops of a case are served by the reference.
An output that a kernel leaves unwritten is seen, because NaN stands in the memory that it gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halocline.hal.call_outputs import Difference, differences
from halocline.hal.errors import InputError, NoKernelError, ShapeError, lines
from halocline.hal.offline import Case, Workbench, inputs_for, takes
from halocline.hal.op import KernelSpec
from halocline.hal.ops import all_ops, find_op
from halocline.hal.stages import REFERENCE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Parity",
    "ParityResult",
    "Refused",
    "check_parity",
    "inputs_for",
    "judge",
    "reference_outputs",
    "survey",
    "takes",
]

# Outputs that a contract lets a kernel leave out.
_OPTIONAL = ("lse_TH",)


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """One kernel on one input.

    Attributes:
        case: Name of the input.
        dtype: Element type.
        outputs: How far each output is from the reference's.
        error: What the kernel raised, or which output it did not give; empty when it did its work.
        refused: Why the kernel does not take an input of this shape, in its own words; empty when it took it.
    """

    case: str
    dtype: str
    outputs: tuple[Difference, ...] = ()
    error: str = ""
    refused: str = ""

    @property
    def within(self) -> bool:
        """Whether the kernel ran and the op's tolerance holds for every output."""
        return not self.error and not self.refused and all(output.within for output in self.outputs)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One kernel on all its inputs.

    Attributes:
        spec: The kernel.
        results: One for each input that it takes.
        refused: One for each input that it states, but whose shape it refuses.
        num_not_taken: Inputs of its op with a format, meaning or size that it does not state.
    """

    spec: KernelSpec
    results: tuple[ParityResult, ...]
    num_not_taken: int
    refused: tuple[ParityResult, ...] = ()

    @property
    def within(self) -> bool:
        """Whether there were inputs, and all of them came out right."""
        return bool(self.results) and all(result.within for result in self.results)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A kernel that cannot run here, and everything that speaks against it."""

    spec: KernelSpec
    reasons: tuple[str, ...]


def survey(
    bench: Workbench, *, op: str | None = None, kernel: str | None = None
) -> tuple[list[KernelSpec], list[Refused]]:
    """The kernels that can run here and the others; the reference is neither.

    Args:
        bench: Kernels, device and packages.
        op: Only this op.
        kernel: Only kernels of this name.

    Raises:
        OverrideError: If there is no such op.
        NoKernelError: If no kernel of that name, or none at all, can run here.
    """
    names = [found.name for found in all_ops()] if op is None else [op]
    specs = [spec for name in names for spec in bench.candidates(name) if spec.name != REFERENCE]
    if kernel is not None:
        specs = [spec for spec in specs if spec.name == kernel]
    refused = [Refused(spec=s, reasons=tuple(found)) for s in specs if (found := bench.against(s))]
    stopped = {id(row.spec) for row in refused}
    able = [spec for spec in specs if id(spec) not in stopped]
    if not able:
        raise _nothing_to_check(bench, op, kernel, refused)
    return able, refused


def _nothing_to_check(bench: Workbench, op: str | None, kernel: str | None, refused: list[Refused]) -> NoKernelError:
    asked = f"{op or 'any op'}={kernel or 'any kernel'}"
    if op is not None or kernel is not None:
        reasons = {f"{r.spec.op}={r.spec.name} {r.spec.vendor}": "; ".join(r.reasons) for r in refused}
        shown = dict(list(reasons.items())[:8])
    else:
        shown = {"found": f"{len(refused)} kernels, none of which can run here"}
    return NoKernelError(
        lines(
            f"nothing to check on {bench.device}: {asked}, and no kernel but the reference can run",
            **shown,
            try_="halocline kernels list",
        )
    )


def check_parity(bench: Workbench, specs: list[KernelSpec]) -> Iterator[Parity]:
    """Runs kernels on all inputs that they take, op by op; the reference computes each input once."""
    for op in dict.fromkeys(spec.op for spec in specs):
        own = [spec for spec in specs if spec.op == op]
        cases = inputs_for(bench, op)
        results: dict[int, list[ParityResult]] = {id(spec): [] for spec in own}
        for case in cases:
            willing = [spec for spec in own if takes(spec, case)]
            expected: Mapping[str, Tensor] = reference_outputs(bench, case) if willing else {}
            for spec in willing:
                results[id(spec)].append(judge(bench, spec, case, expected))
        for spec in own:
            tried = results[id(spec)]
            yield Parity(
                spec=spec,
                results=tuple(result for result in tried if not result.refused),
                num_not_taken=len(cases) - len(tried),
                refused=tuple(result for result in tried if result.refused),
            )


def reference_outputs(bench: Workbench, case: Case) -> Mapping[str, Tensor]:
    """What the reference gives for an input, on the CPU."""
    return case.run(bench.ops(bench.bind(case.op, REFERENCE)), "cpu")


def judge(bench: Workbench, spec: KernelSpec, case: Case, expected: Mapping[str, Tensor] | None = None) -> ParityResult:
    """Runs a kernel on one input and compares with what the reference gave, or gives now.

    What the kernel raises becomes part of the result: one kernel that fails does not hide the others.
    """
    op = find_op(case.op)
    if op is None:
        raise InputError(f"the input {case.name!r} is for {case.op}, which is no op")
    if expected is None:
        expected = reference_outputs(bench, case)
    ops = bench.ops(bench.bind(spec.op, spec.name))
    _poison(bench.device.torch_device)
    try:
        found = case.run(ops, bench.device.torch_device)
    except ShapeError as error:
        return ParityResult(case=case.name, dtype=case.dtype, refused=str(error))
    except Exception as error:  # a kernel under test may raise anything
        return ParityResult(case=case.name, dtype=case.dtype, error=f"{type(error).__name__}: {error}")
    missing = [name for name in expected if name not in found and not name.endswith(_OPTIONAL)]
    return ParityResult(
        case=case.name,
        dtype=case.dtype,
        outputs=differences(op, found, expected, case.dtype),
        error=f"gave no {', '.join(missing)}" if missing else "",
    )


def _poison(device: str) -> None:
    """Leaves NaN in blocks of many sizes, which the allocator hands out next; a CPU's large ones come cleared."""
    import torch

    largest = 14 if device == "cpu" else 24
    blocks = [torch.full((2**power,), torch.nan, device=device) for power in range(6, largest, 2) for _ in range(4)]
    del blocks
