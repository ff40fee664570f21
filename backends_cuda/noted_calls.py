"""Calls of libraries that are noted instead of made, so that what these compile is known before it is needed.

Within `noting` the functions that kernels of this backend call are stood in for. A stand-in gives memory of zeros in
the form that the library's own result has; no kernel of the library is launched on numbers that nobody computed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["STOOD_IN", "LibraryCall", "TensorForm", "complete_arguments", "noting"]

STOOD_IN = frozenset({"deep_gemm", "flash_mla", "flashinfer", "sgl_kernel", "triton_kernels"})
"""Libraries that a step may call within `noting`.

Of sgl_kernel that is FlashMLA, of FlashInfer its hyper-connections; of both also kernels that take each row by itself,
which may be launched on anything. triton_kernels launches through Triton, where launches are recorded.
"""


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class LibraryCall:
    """A call that was noted; equal calls make a library compile the same.

    Attributes:
        module: Where the function is.
        function: Its name.
        arguments: By place; tensors by their form.
        options: By name.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The function with its module."""
        return f"{self.module}.{self.function}"


@dataclass(frozen=True, kw_only=True)
class _StandIn:
    """What takes a function's place.

    Attributes:
        module: Where the function is.
        function: Its name.
        result: What is given instead of its result, from the same arguments.
        compiles: What the library compiles anew for: the form of arguments, its first call at all, or nothing.
        trim: What of the arguments is noted.
        complete: Changes arguments of zeros, by place, to such as the function may be called with.
    """

    module: str
    function: str
    result: Callable[..., Any]
    compiles: Literal["forms", "once", "nothing"]
    trim: Callable[..., tuple[Any, ...]] = lambda *arguments: arguments
    complete: Callable[[list[Any]], None] = lambda arguments: None

    def key(self, call: LibraryCall) -> Hashable:
        return call if self.compiles == "forms" else self.module


def _nothing(*_: Any, **__: Any) -> None:
    """Results go to tensors that the caller brings."""


def _schedule(lengths: Tensor, page_rows: int, num_programs: int) -> Tensor:
    return torch.zeros((num_programs + 1, 2), dtype=torch.int32, device=lengths.device)


def _logits(num_tokens: int, num_entries: int, device: torch.device) -> Tensor:
    """One row of zeros that is each token's: a step's logits may take gigabytes."""
    return torch.zeros((1, num_entries), dtype=torch.float32, device=device).expand(num_tokens, num_entries)


def _paged_logits(q: Tensor, *arguments: Any, **_: Any) -> Tensor:
    return _logits(len(q), arguments[-1], q.device)


def _gathered_logits(q: Tensor, keys: tuple[Tensor, Tensor], *_: Any, **__: Any) -> Tensor:
    return _logits(len(q), len(keys[0]), q.device)


def _one_page(q: Tensor, pages: Tensor, *arguments: Any) -> tuple[Any, ...]:
    return (q, pages[:1], *arguments)


def _see_a_key(arguments: list[Any]) -> None:
    """The library's scheduler needs a token that sees a key."""
    arguments[0] = torch.ones_like(arguments[0])


def _schedule_a_key(arguments: list[Any]) -> None:
    """Every token sees one key, and the schedule says so."""
    from halocline.backends_cuda.indexer_deep_gemm import logits_schedule

    arguments[3] = torch.ones_like(arguments[3])
    arguments[5] = logits_schedule(arguments[3])


def _streams_read(logits: Tensor, squares: Tensor, streams: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, count, _hidden = streams.shape
    post = torch.zeros((num_tokens, count, 1), dtype=torch.float32, device=streams.device)
    comb = torch.zeros((num_tokens, count, count), dtype=torch.float32, device=streams.device)
    return post, comb, torch.zeros_like(streams[:, 0], memory_format=torch.contiguous_format)


def _streams_written(y: Tensor, streams: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(streams)


def _decoded(q: Tensor, *arguments: Any, **_: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_queries, num_heads, _width = q.shape
    lanes = arguments[3]
    out = torch.zeros((num_tokens, num_queries, num_heads, lanes), dtype=q.dtype, device=q.device)
    return out, torch.zeros((num_tokens, num_heads, num_queries), dtype=torch.float32, device=q.device)


def _prefilled(q: Tensor, *arguments: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    lanes, per_head = arguments[3], torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    return torch.zeros((*q.shape[:2], lanes), dtype=q.dtype, device=q.device), per_head, per_head.clone()


def _deep_gemm(function: str, result: Callable[..., Any], **options: Any) -> _StandIn:
    return _StandIn(module="deep_gemm", function=function, result=result, compiles="forms", **options)


_STAND_INS = (
    _deep_gemm("fp8_gemm_nt", _nothing),
    _deep_gemm("fp8_einsum", _nothing),
    _deep_gemm("tf32_hc_prenorm_gemm", _nothing),
    _deep_gemm("get_paged_mqa_logits_metadata", _schedule, complete=_see_a_key),
    _deep_gemm("fp8_paged_mqa_logits", _paged_logits, trim=_one_page, complete=_schedule_a_key),
    _deep_gemm("fp8_mqa_logits", _gathered_logits),
    _StandIn(module="flashinfer.mhc", function="mhc_pre_big_fuse", result=_streams_read, compiles="once"),
    _StandIn(module="flashinfer.mhc", function="mhc_post", result=_streams_written, compiles="once"),
    *(
        stand_in
        for home in ("sgl_kernel.flash_mla", "flash_mla")
        for stand_in in (
            _StandIn(module=home, function="flash_mla_with_kvcache", result=_decoded, compiles="nothing"),
            _StandIn(module=home, function="flash_mla_sparse_fwd", result=_prefilled, compiles="nothing"),
        )
    ),
)


@contextmanager
def noting(libraries: Collection[str]) -> Iterator[dict[Hashable, LibraryCall]]:
    """Within, calls of libraries are noted, and not made.

    Args:
        libraries: Modules of those that kernels may call; they are imported here.

    Yields:
        The first call of each thing that a library compiles; filled meanwhile.
    """
    found: dict[Hashable, LibraryCall] = {}
    used = [stand_in for stand_in in _STAND_INS if stand_in.module.partition(".")[0] in libraries]
    owners = [importlib.import_module(stand_in.module) for stand_in in used]
    originals = [getattr(owner, stand_in.function) for owner, stand_in in zip(owners, used, strict=True)]
    for owner, stand_in in zip(owners, used, strict=True):
        setattr(owner, stand_in.function, _noted(stand_in, found))
    try:
        yield found
    finally:
        for owner, stand_in, original in zip(owners, used, originals, strict=True):
            setattr(owner, stand_in.function, original)


def complete_arguments(call: LibraryCall, arguments: list[Any]) -> None:
    """Changes arguments of zeros, by place, to such as the function may be called with."""
    for stand_in in _STAND_INS:
        if (stand_in.module, stand_in.function) == (call.module, call.function):
            stand_in.complete(arguments)


def _noted(stand_in: _StandIn, found: dict[Hashable, LibraryCall]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if stand_in.compiles != "nothing":
            noted = LibraryCall(
                stand_in.module,
                stand_in.function,
                _form(stand_in.trim(*arguments)),
                tuple((name, _form(value)) for name, value in sorted(options.items())),
            )
            found.setdefault(stand_in.key(noted), noted)
        return stand_in.result(*arguments, **options)

    return call


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorForm(value.dtype, tuple(value.shape), value.stride())
    if isinstance(value, (tuple, list)):
        return tuple(_form(one) for one in value)
    return value
