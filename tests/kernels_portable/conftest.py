"""Runs the portable kernels in Triton's interpreter, on the CPU, and repairs the interpreter where it computes wrongly.

Whether a kernel is interpreted is decided when `triton.jit` decorates it, and Triton's own library functions are
decorated when `triton` is imported. So these tests import their own copies of both while `TRITON_INTERPRET` is set, and
put everything back afterwards: other tests of the same process see kernels as they would be launched on a device.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

_VARIABLE = "TRITON_INTERPRET"
_KERNELS = "halocline.kernels_portable"
_interpreted: dict[str, ModuleType] = {}


def _is_ours(name: str) -> bool:
    is_triton = name.partition(".")[0] == "triton" and not name.startswith("triton._C")
    return is_triton or name.startswith(_KERNELS)


def _take() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if _is_ours(name)}


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, `triton` and the portable kernels are the interpreted copies."""
    before, variable = _take(), os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    sys.modules.update(_interpreted)
    try:
        if not _interpreted:
            _repair_interpreter()
        yield
    finally:
        _interpreted.update(_take())
        sys.modules.update(before)
        if variable is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = variable


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Imports the test modules of this folder, and with them the kernels, interpreted."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with interpreted():
        return (yield)


@pytest.fixture(autouse=True)
def _run_interpreted() -> Iterator[None]:
    with interpreted():
        yield


# ---- repairs ----------------------------------------------------------------------------------------------------


def _repair_interpreter() -> None:
    """Replaces the interpreter's float conversions and products, and lets it take a product by bfloat16 parts.

    bfloat16 operands of `tl.dot` are multiplied as the integers that carry them, float32 is truncated to bfloat16 and
    rounding to E4M3 loses carries into the exponent. `test_interpreter.py` fails when a Triton release mends one.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle, _patch_lang

    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, allowed_dot_input_precisions=(*options.allowed_dot_input_precisions, "bf16x6")
    )

    kinds = {
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e4b8: torch.float8_e4m3fnuz,
    }

    def as_torch(handle: Any) -> Tensor:
        kind = kinds[handle.dtype.scalar]
        return torch.from_numpy(np.ascontiguousarray(handle.data)).view(kind)

    def as_handle(values: Tensor, kind: Any) -> Any:
        carrier = {1: torch.uint8, 2: torch.uint16}.get(values.element_size())
        carried = carrier is not None and values.dtype != torch.float16
        return TensorHandle((values.view(carrier) if carried else values).numpy(), kind)

    broken_cast, broken_to_fp, broken_dot = (
        InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_dot,
    )  # fmt: skip

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if src.dtype.scalar in kinds and target in kinds:
            return as_handle(as_torch(src).to(kinds[target]), target)
        return broken_cast(self, src, dst_type)

    def to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar in kinds and dst_type.scalar in kinds:
            return cast(self, src, dst_type)
        return broken_to_fp(self, src, dst_type, rounding_mode)

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        narrow = (tl.bfloat16, tl.float8e4nv, tl.float8e4b8)
        wide = [as_handle(as_torch(x).float(), tl.float32) if x.dtype.scalar in narrow else x for x in (a, b)]
        return broken_dot(self, *wide, d, input_precision, max_num_imprecise_acc)

    for repaired in (cast, to_fp, dot):
        repaired.broken = {"cast": broken_cast, "to_fp": broken_to_fp, "dot": broken_dot}[repaired.__name__]  # type: ignore[attr-defined]
    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from kernel to kernel; inspecting the whole language again each time costs a third of a run."""
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            _patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = to_fp
    InterpreterBuilder.create_dot = dot


def pytest_unconfigure() -> None:
    """Gives the copies back to Python, which unloads modules in the order that Triton expects."""
    for name, module in _interpreted.items():
        sys.modules.setdefault(name, module)
    _interpreted.clear()


# ---- formulas that several tests share ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rope_table() -> Any:
    """Makes a table of cosines and sines, (positions, lanes), pairs at lanes 2i and 2i + 1."""

    def table(positions: int, lanes: int) -> Tensor:
        angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, lanes, 2) / lanes)
        return torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1).contiguous()

    return table


@pytest.fixture(scope="session")
def rotate() -> Any:
    """Rotates the last lanes of (tokens, ..., lanes) as complex numbers."""

    def rotated(x: Tensor, table: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        lanes = table.shape[1]
        turn = torch.view_as_complex(table.unflatten(1, (-1, 2)).contiguous())[positions]
        turn = (turn.conj() if inverse else turn).view(x.shape[0], *(1,) * (x.dim() - 2), lanes // 2)
        tail = torch.view_as_complex(x[..., -lanes:].float().contiguous().unflatten(-1, (-1, 2))) * turn
        return torch.cat([x[..., :-lanes], torch.view_as_real(tail).flatten(-2)], dim=-1)

    return rotated
