"""Which steps are tried on padding before an engine is ready, so that nothing is compiled afterwards.

Kernels are compiled apart for some numbers of a step: tiles by tokens, parts by tokens that decode, selections by the
longest sequence. Each of these choices changes a few times only as its number grows, so that a few sizes meet them all.
The steps follow from the configuration alone: every rank runs the same ones. What they launch may be compiled in
parallel before the first of them. Free of torch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from halocline.engine.progress import progress_bar

if TYPE_CHECKING:
    from halocline.hal.backend import Backend
    from halocline.hal.table import KernelTable

__all__ = ["Builder", "WarmUpStep", "kernel_builder", "warm_up_steps", "warm_up_tokens"]

Builder = Callable[[Callable[[], None]], None]
"""Compiles what a function launches, in parallel and without its launches, before the function is called."""

_FEWEST_POSITIONS = 256
_MOST_ALONE = 256  # tokens of one request: enough for what serves a long prompt alone


class WarmUpStep(NamedTuple):
    """A step of padding.

    Attributes:
        mixed: Whether it uses the buffers of steps with prefill.
        num_tokens: Tokens.
        num_requests: Requests; one token each of those that decode.
        num_decode: Requests that decode.
        max_seqlen: Longest sequence that is claimed.
    """

    mixed: bool
    num_tokens: int
    num_requests: int
    num_decode: int
    max_seqlen: int


def warm_up_tokens(max_step_tokens: int, *, compiles: bool) -> tuple[int, ...]:
    """Numbers of tokens that meet every choice by that number: two for each power of two, and the most.

    A choice that holds for less than a factor of 1.5 could be missed; none of ours is that fine.

    Args:
        max_step_tokens: Tokens of a step.
        compiles: Whether the device compiles kernels on first use; one that does not needs a single token.
    """
    if not compiles:
        return (1,)
    powers = [1 << bit for bit in range(max_step_tokens.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return tuple(sorted(size for size in {*powers, *between, max_step_tokens} if size <= max_step_tokens))


def warm_up_steps(
    sizes: tuple[int, ...], *, max_requests: int, max_step_tokens: int, max_positions: int
) -> tuple[WarmUpStep, ...]:
    """The steps of an engine: all sizes with many requests; one request alone; decode, alone and beside others.

    Args:
        sizes: Numbers of tokens, as `warm_up_tokens` gives them; a device that compiles nothing needs none but 1.
        max_requests: Requests in flight.
        max_step_tokens: Tokens of a step.
        max_positions: Longest context.
    """

    def prefill(num_tokens: int, num_requests: int, max_seqlen: int = max_positions) -> WarmUpStep:
        return WarmUpStep(True, num_tokens, num_requests, 0, max_seqlen)

    def decode(count: int, max_seqlen: int = max_positions) -> WarmUpStep:
        return WarmUpStep(False, count, count, count, max_seqlen)

    def beside(count: int, num_tokens: int, max_seqlen: int = max_positions) -> WarmUpStep:
        return WarmUpStep(True, count + num_tokens, count + 1, count, max_seqlen)

    steps = [prefill(size, min(size, max_requests)) for size in sizes]
    if sizes == (1,):
        return *steps, decode(1)
    most_beside = min(max_requests, max_step_tokens) - 1
    counts = sorted({*(size for size in sizes if size <= most_beside), *([most_beside] if most_beside else [])})
    lengths = [_FEWEST_POSITIONS << bit for bit in range(max_positions.bit_length())]
    lengths = [length for length in lengths if length < max_positions] + [max_positions]
    alone = min(_MOST_ALONE, max_step_tokens)
    for length in lengths:
        steps.append(prefill(min(alone, length), 1, length))
        steps.append(decode(1, length))
        if most_beside:
            steps.append(beside(1, 1, length))
    steps += [beside(count, 1) for count in counts]
    if most_beside:
        steps.append(beside(1, min(alone, max_step_tokens - 1)))
    steps += [decode(size) for size in sorted({*sizes, max_requests}) if size <= max_requests]
    return tuple(dict.fromkeys(steps))


def kernel_builder(table: KernelTable, backend: Backend | None, *, shown: bool | None = None) -> Builder | None:
    """What compiles kernels on all processors of this process; None where their launches cannot be foreseen.

    Args:
        table: Which kernels there are.
        backend: Runtime services of their device; None for a device that compiles nothing.
        shown: Whether to draw a bar; None draws one if stderr is a terminal.
    """
    if backend is None or not backend.can_build(table.libraries):
        return None
    progress = functools.partial(progress_bar, "compiling kernels", shown=shown)
    workers = len(os.sched_getaffinity(0))
    return functools.partial(backend.build, libraries=table.libraries, workers=workers, progress=progress)
