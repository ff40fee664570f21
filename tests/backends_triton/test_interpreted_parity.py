"""L1 of what AMD devices bind: each shared wrapper agrees with the reference in the interpreter, in both dialects.

Layers of experts take minutes here; `tests/kernels_portable` runs them at sizes of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halocline.backends_hip.manifest import MANIFEST
from halocline.hal.call_outputs import differences
from halocline.hal.op import KernelSpec
from halocline.hal.ops import find_op

SPECS = [spec for spec in MANIFEST.specs if spec.name in ("triton", "torch") and spec.op != "moe.experts"]


def takes(spec: KernelSpec, case: Any) -> bool:
    """Whether a record's formats and meanings allow a case."""
    wanted = {**case.formats, **case.semantics}
    allowed = {**spec.formats, **spec.semantics}
    return all(value in allowed[name] for name, value in wanted.items() if name in allowed)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.op)
def test_a_wrapper_agrees_with_the_reference(
    interpreted_parity: Callable[..., Any], small_cases: Callable[[str], list[Any]], spec: KernelSpec
) -> None:
    """One input, at least, of each element type, format and dialect."""
    op = find_op(spec.op)
    assert op is not None
    cases = first_of_each([case for case in small_cases(spec.op) if takes(spec, case)])
    assert cases
    for case in cases:
        wrong = [row for row in differences(op, *interpreted_parity(case, spec), case.dtype) if not row.within]
        assert wrong == [], case


def first_of_each(cases: list[Any]) -> list[Any]:
    kinds: dict[object, Any] = {}
    for case in cases:
        kinds.setdefault((case.dtype, *sorted({**case.formats, **case.semantics}.items())), case)
    return list(kinds.values())
