"""Kernels that a function would launch, compiled side by side before it is run.

The function runs once with every launch recorded: its kernels and their specialisations are known before the first is
compiled. Nothing that it reads then was computed by a kernel. What it allocates is filled with zeros, so that an index
that a kernel would have written is a valid one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from halocline.kernels_portable.aot import Launch, compile_key, recording

__all__ = ["build_launches", "distinct_launches"]

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 2.0  # in which kernels of an earlier run are read again
_ALLOCATORS = (
    (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)  # fmt: skip


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Within, memory that torch would leave as it is holds zeros.

    A mode of torch's would do the same, and take as long as all else that a step does on the host.
    """

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: allocate(*args, **kwargs).zero_()

    originals = [getattr(owner, name) for owner, name in _ALLOCATORS]
    for (owner, name), original in zip(_ALLOCATORS, originals, strict=True):
        setattr(owner, name, filled(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(_ALLOCATORS, originals, strict=True):
            setattr(owner, name, original)


@dataclass(frozen=True)
class _Pointer:
    """What Triton looks at of a tensor, without its memory."""

    dtype: torch.dtype
    address: int
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Pointer:
        return cls(tensor.dtype, tensor.data_ptr(), tensor.untyped_storage().size())

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.nbytes


def distinct_launches(run: Callable[[], object], target: GPUTarget) -> list[Launch]:
    """The first launch of each kernel, by what Triton compiles apart, in the order of `run`. No memory is kept.

    Args:
        run: Whatever launches. Its launches do not happen; everything else that it does, does.
        target: For what would be compiled.
    """
    found: dict[tuple[Any, ...], Launch] = {}

    def take(launch: Launch) -> None:
        key = compile_key(launch, target)
        if key not in found:
            arguments = {
                name: _Pointer.of(value) if isinstance(value, Tensor) else value
                for name, value in launch.arguments.items()
            }
            found[key] = replace(launch, arguments=arguments)

    with recording(take), _filled_memory():
        run()
    return list(found.values())


def build_launches(
    launches: Sequence[Launch],
    *,
    workers: int,
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]],
    begin_thread: Callable[[], None] | None = None,
    others: Mapping[Future[None], str] = MappingProxyType({}),
) -> None:
    """Compiles for the current device what recorded launches need, or finds it in Triton's cache.

    A kernel that does not compile is named in a warning, once; launching it will tell everything.

    Args:
        launches: From `distinct_launches`.
        workers: Threads. Triton's compiler releases the interpreter for most of its time.
        progress: Takes the number of kernels and shows how many of them are ready; not used if all are at once.
        begin_thread: Called first in each thread, to choose the device there.
        others: What else is being compiled meanwhile, with names; counted and waited for, too.
    """
    if not launches and not others:
        return
    device = driver.active.get_current_device()
    for launch in launches:
        launch.kernel.device_caches[device]  # made here, as it would be made twice by two threads
    pool = ThreadPoolExecutor(max(1, min(workers, len(launches))), initializer=begin_thread)
    try:
        own = {pool.submit(_compile, launch): launch.name for launch in launches}
        pending = {**own, **others}
        if wait(pending, timeout=_QUIET_SECONDS).not_done:
            with progress(len(pending)) as advance:
                for number, _ in enumerate(as_completed(pending), 1):
                    advance(number)
    finally:
        pool.shutdown(cancel_futures=True)
    _warn({name: future.exception() for future, name in own.items() if future.exception()})
    for future, name in others.items():
        if future.exception():  # it may go right in a step, or else that tells everything
            logger.debug("%s: not compiled beforehand: %s", name, future.exception())


def _compile(launch: Launch) -> None:
    start = time.perf_counter()
    launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
    logger.debug("%s: compiled in %.2f s", launch.name, time.perf_counter() - start)


def _warn(failures: dict[str, BaseException | None]) -> None:
    for name, error in failures.items():
        logger.warning("the kernel %s cannot be compiled: %s: %s", name, type(error).__name__, error)
