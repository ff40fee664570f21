"""The interpreter computes as a device does where it was repaired, and still needs the repairs."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

_FLOATS = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz]


@triton.jit
def _convert(x_ptr, out_ptr, size: tl.constexpr):
    lanes = tl.arange(0, size)
    tl.store(out_ptr + lanes, tl.load(x_ptr + lanes).to(out_ptr.dtype.element_ty))


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, size: tl.constexpr):
    rows, lanes = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    a, b = tl.load(a_ptr + rows * size + lanes), tl.load(b_ptr + rows * size + lanes)
    tl.store(out_ptr + rows * size + lanes, tl.dot(a, b))


def _values() -> torch.Tensor:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 20
    x[:4] = torch.tensor([0.0, 1.9999, -0.4999, 15.75])
    return x


def _multiply(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    a, b = (torch.randn(16, 16, generator=gen).to(dtype) for _ in range(2))
    out = torch.full((16, 16), torch.nan)
    _product[(1,)](a, b, out, size=16)
    return out, a.float() @ b.float()


def test_kernels_of_this_folder_are_interpreted() -> None:
    assert isinstance(_convert, InterpretedFunction)
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert sys.modules["triton"] is triton


@pytest.mark.parametrize("dtype", _FLOATS)
def test_float32_rounds_to_the_nearest_even(dtype: torch.dtype) -> None:
    x = _values()
    out = torch.empty(x.shape, dtype=dtype)
    _convert[(1,)](x, out, size=x.numel())
    assert torch.equal(out.float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", _FLOATS)
def test_every_code_is_read_back(dtype: torch.dtype) -> None:
    size = 1 << (8 * dtype.itemsize)
    codes = torch.arange(size).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    out = torch.full((size,), torch.nan)
    _convert[(1,)](codes, out, size=size)
    assert torch.equal(out.nan_to_num(7e7), codes.float().nan_to_num(7e7))


@pytest.mark.parametrize("dtype", [*_FLOATS, torch.float16, torch.float32])
def test_products_are_those_of_the_values(dtype: torch.dtype) -> None:
    out, expected = _multiply(dtype)
    torch.testing.assert_close(out, expected, rtol=1e-3 if dtype is torch.float16 else 1e-6, atol=1e-5)


def test_the_repairs_are_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a Triton release passes without one of them, this fails and the repair can go."""
    repairs: dict[str, Any] = {
        name: vars(InterpreterBuilder)[name] for name in ("cast_impl", "create_fp_to_fp", "create_dot")
    }
    for name, repaired in repairs.items():
        monkeypatch.setattr(InterpreterBuilder, name, repaired.broken)
    out, expected = _multiply(torch.bfloat16)
    assert not torch.allclose(out, expected, rtol=0.1)
    x = _values()
    for dtype in _FLOATS:
        rounded = torch.empty(x.shape, dtype=dtype)
        _convert[(1,)](x, rounded, size=x.numel())
        assert not torch.equal(rounded.float(), x.to(dtype).float())
