"""Every kernel that can run on the device of this machine, on every input that it takes, against the reference.

The tests of kernels exist where their device does and carry its marker; a machine without one says that it has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from halocline.cli.compare import workbench
from halocline.hal.errors import NoKernelError
from halocline.hal.offline import Workbench
from halocline.hal.parity import inputs_for, judge, reference_outputs, survey, takes

MARKERS = {"nvidia": pytest.mark.cuda, "amd": pytest.mark.hip}


@functools.cache
def bench() -> Workbench:
    return workbench()


def pairs() -> list[Any]:
    """Every input with each kernel that takes it; kernels of one input stand together."""
    here = bench()
    if not here.device.is_gpu:
        return []
    able, _ = survey(here)
    return [
        pytest.param(spec, case, id=f"{spec.name}-{case}", marks=MARKERS[here.device.vendor])
        for op in dict.fromkeys(spec.op for spec in able)
        for case in inputs_for(here, op)
        for spec in able
        if spec.op == op and takes(spec, case)
    ]


@pytest.fixture(scope="module")
def answer() -> Callable[[Any], Mapping[str, Any]]:
    """What the reference gives; the last input's answer is kept for the next kernel."""
    last: dict[str, Mapping[str, Any]] = {}

    def give(case: Any) -> Mapping[str, Any]:
        if str(case) not in last:
            last.clear()
            last[str(case)] = reference_outputs(bench(), case)
        return last[str(case)]

    return give


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize(("spec", "case"), pairs())


if bench().device.is_gpu:

    def test_a_kernel_equals_the_reference(spec: Any, case: Any, answer: Callable[[Any], Mapping[str, Any]]) -> None:
        result = judge(bench(), spec, case, answer(case))
        assert result.within or result.refused, result

    @pytest.mark.parametrize("op", sorted({spec.op for spec in survey(bench())[0]}))
    def test_each_kernel_is_asked_something(op: str) -> None:
        cases = inputs_for(bench(), op)
        for spec in survey(bench(), op=op)[0]:
            assert any(takes(spec, case) for case in cases), spec.name

else:

    def test_this_machine_can_run_the_reference_alone() -> None:
        with pytest.raises(NoKernelError, match="nothing to check on cpu"):
            survey(bench())
