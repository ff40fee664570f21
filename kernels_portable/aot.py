"""Ahead-of-time compilation: what a launcher would launch is recorded, and compiled without a device.

`recorded_launches` runs a launcher on tensors of any device (`meta` costs no memory) and keeps what it would have
launched, so that lists of kernels to compile, for tests and for warm-up, are calls of the real launchers.
`compile_key` tells which of them are one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

__all__ = ["Launch", "compile_key", "compile_launch", "recorded_launches", "recording"]

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch:
    """One launch that did not happen.

    Attributes:
        kernel: The jitted function.
        arguments: Every argument by name: tensors, numbers and compile-time constants.
        options: Compiler options such as `num_warps`, in the launch's order, by which Triton remembers them.
        grid: Programs.
    """

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__).removeprefix("_").removesuffix("_kernel")


@contextmanager
def recording(take: Callable[[Launch], object]) -> Iterator[None]:
    """Within, every kernel launch is handed to `take` instead; nothing is computed."""

    def record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in [*kwargs] if name not in kernel.arg_names}
        arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        take(Launch(kernel=kernel, arguments=arguments, options=options, grid=tuple(grid)))

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = original


def recorded_launches(launcher: Callable[[], object]) -> list[Launch]:
    """Runs a launcher with every kernel launch replaced by a record of it; nothing is computed."""
    launches: list[Launch] = []
    with recording(launches.append):
        launcher()
    return launches


@functools.cache
def _binder(kernel: JITFunction[Any], target: GPUTarget) -> Callable[..., tuple[Any, Any, Any]]:
    binder: Callable[..., tuple[Any, Any, Any]] = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(target)
    )
    return binder


def compile_key(launch: Launch, target: GPUTarget) -> tuple[Any, ...]:
    """What Triton compiles a launch by, as it computes it itself: a launch of another key is compiled anew."""
    _, specialization, options = _binder(launch.kernel, target)(**launch.arguments, **launch.options)
    return launch.kernel.module, launch.kernel.__name__, tuple(specialization), tuple(sorted(options.items()))


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """Signature, constants and attributes as a launch would give: 1 is a constant, multiples of 16 are marked."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif parameter.do_not_specialize and isinstance(value, int):
            signature[parameter.name] = "i32"
        elif parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def compile_launch(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Compiles a recorded launch for an architecture; a defect of the compiler may end the process."""
    signature, constants, attributes = _specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=dict(launch.options))
