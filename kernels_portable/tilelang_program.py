"""Building, compiling and lowering of tilelang programs. No device is asked for at import or while a program is built.

A program is made for sizes and tiles by a factory, `<name>_program`, and is the same text for every architecture:
what differs (threads of a wave, number of E4M3) are arguments. A launcher compiles it for the device at hand at its
first call; `lower` gives the source text for any architecture, without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import tilelang
import tilelang.language as T  # noqa: N812 (its own idiom)
from tilelang import tvm

__all__ = ["Lowered", "compiled", "jit_macro", "jit_program", "lower", "num_threads"]


def jit_program(**parameters: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a tilelang program of a function, given the type of each of its parameters.

    tilelang evaluates annotations where it cannot see the sizes of a factory; here they are values from the start.
    """

    def build(body: Callable[..., None]) -> Any:
        body.__annotations__ = parameters
        return T.prim_func(body)

    return build


jit_macro = T.macro  # a part of a program, written once; its parameters have no Python type


@lru_cache(maxsize=256)
def compiled(factory: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """The kernel of `factory(*arguments)`, compiled for the device at hand, once."""
    return tilelang.compile(factory(*arguments), execution_backend="tvm_ffi")  # type: ignore[no-any-return]


class Lowered(NamedTuple):
    """A program as source text for one architecture, with what a launch of it takes."""

    source: str
    threads: int
    shared_memory: int


def lower(program: Any, target: Mapping[str, str]) -> Lowered:
    """Lowers a program for an architecture, such as `{"kind": "...", "mcpu": "gfx942"}`; needs no device."""
    with tvm.target.Target(dict(target)) as found:
        artifact = tilelang.lower(program, target=found, enable_host_codegen=False, enable_device_compile=False)
    (kernel,) = artifact.device_mod.functions.values()
    threads = int(kernel.attrs["thread_extent"]["threadIdx.x"])
    return Lowered(str(artifact.kernel_source), threads, int(kernel.attrs.get("dyn_shared_memory_buf", 0)))


def num_threads(wave_size: int, lanes: int = 256) -> int:
    """Threads of a program: whole waves, at least one, `lanes` where they fit."""
    return max(wave_size, lanes // wave_size * wave_size)
