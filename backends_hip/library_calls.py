"""Calls into AMD's libraries as they were recorded, and the check that what is installed still has that form.

The libraries cannot run where this was written: what is known of them was read. Each adapter takes its function from
here when it is imported, which is when its kernel is bound, so that a changed signature stops the start.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from halocline.backends_hip.manifest import AITER, TOKENSPEED
from halocline.hal.errors import KernelImportError, lines
from halocline.hal.op import Provider
from halocline.hal.runtime import import_provider

__all__ = ["CALLS", "LibraryCall", "check_signature", "library_function"]


@dataclass(frozen=True, kw_only=True)
class LibraryCall:
    """A function of a library as it was recorded.

    Attributes:
        providers: Where the library may live.
        module: Module that holds the function.
        function: Its name there.
        parameters: What an adapter relies on, as in a definition. Parameters that are not listed must have defaults;
            a default of `...` may be anything.
        origin: Where this was read.
    """

    providers: tuple[Provider, ...]
    module: str
    function: str
    parameters: str
    origin: str

    @property
    def text(self) -> str:
        """The recorded form, for messages."""
        return f"{self.module}.{self.function}({self.parameters})"


_TREE = "aiter's tree, August 2026"
_WHEEL = "tokenspeed-kernel-amd 0.1.4"


def _aiter(module: str, function: str, parameters: str) -> LibraryCall:
    return LibraryCall(providers=AITER, module=module, function=function, parameters=parameters, origin=_TREE)


CALLS = (
    _aiter(
        "aiter.ops.triton.attention.pa_decode_sparse",
        "pa_decode_sparse",
        "q, unified_kv, kv_indices, kv_indptr, attn_sink, softmax_scale, kv_scales=None, block_h=None, kv_splits=None, "
        "has_invalid=True, skip_reduce=False, USE_EXP2=None, *, extra_cache=None, extra_indices=None, "
        "extra_indptr=None",
    ),
    _aiter(
        "aiter.ops.triton.attention.pa_prefill_sparse",
        "pa_prefill_sparse",
        "q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend, attn_sink, "
        "softmax_scale, has_invalid=None",
    ),
    _aiter("aiter", "gemm_a8w8_blockscale", "XQ, WQ, x_scale, w_scale, dtype=..., isBpreshuffled=False"),
    _aiter(
        "aiter.fused_moe",
        "fused_moe",
        "hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=..., quant_type=..., "
        "doweight_stage1=False, w1_scale=None, w2_scale=None, swiglu_limit=None",
    ),
    _aiter(
        "aiter.ops.topk",
        "topk_gating",
        "topk_weights, topk_indices, gating_output, correction_bias=None, need_renorm=True, routed_scaling_factor=1.0, "
        "score_func='sqrtsoftplus'",
    ),
    _aiter(
        "aiter.ops.triton.attention.pa_mqa_logits",
        "deepgemm_fp8_paged_mqa_logits",
        "q_fp8, kv_cache, weights, out_logits, context_lens, kv_indices, max_model_len, Preshuffle=False, "
        "KVBlockSize=1, ChunkK=256",
    ),
    _aiter(
        "aiter.ops.topk",
        "top_k_per_row_prefill",
        "logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k=2048, stable=False",
    ),
    _aiter(
        "aiter.ops.mhc",
        "mhc_pre",
        "residual, fn, hc_scale, hc_base, rms_eps=..., hc_pre_eps=..., hc_sinkhorn_eps=..., hc_post_mult_value=1.0, "
        "sinkhorn_repeat=20, norm_weight=None",
    ),
    _aiter("aiter.ops.mhc", "mhc_post", "out, x, residual, post_layer_mix, comb_res_mix"),
    LibraryCall(
        providers=TOKENSPEED,
        module="tokenspeed_kernel_amd.ops.gfx950.attention.dsv4.prefill",
        function="launch_gluon_dsv4_prefill_gfx950",
        parameters="q, kv, indices, lens, attn_sink, softmax_scale, out=None",
        origin=_WHEEL,
    ),
)


def _recorded(parameters: str) -> inspect.Signature:
    (definition,) = ast.parse(f"def f({parameters}): ...").body
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    positional, defaults = arguments.args, arguments.defaults
    first = len(positional) - len(defaults)
    found = [
        inspect.Parameter(
            argument.arg,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=ast.literal_eval(defaults[place - first]) if place >= first else inspect.Parameter.empty,
        )
        for place, argument in enumerate(positional)
    ]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        assert default is not None
        kind = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(argument.arg, kind, default=ast.literal_eval(default)))
    return inspect.Signature(found)


def _faults(recorded: inspect.Signature, found: inspect.Signature) -> list[str]:
    """How a function's signature no longer carries the recorded call."""
    faults = []
    order = [name for name in found.parameters if name in recorded.parameters]
    for name, wanted in recorded.parameters.items():
        given = found.parameters.get(name)
        if given is None:
            faults.append(f"{name} is gone")
        elif given.kind is not wanted.kind:
            faults.append(f"{name} is {given.kind.description}")
        elif wanted.default is not ... and given.default != wanted.default:
            faults.append(f"{name} has another default")
    if not faults and order != list(recorded.parameters):
        faults.append(f"the order is {', '.join(order)}")
    for name, given in found.parameters.items():
        is_variadic = given.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if name not in recorded.parameters and given.default is inspect.Parameter.empty and not is_variadic:
            faults.append(f"{name} is new and has no default")
    return faults


def check_signature(call: LibraryCall, function: Callable[..., Any]) -> None:
    """Compares a function with its record.

    Raises:
        KernelImportError: If the recorded call no longer fits, with both signatures.
    """
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise KernelImportError(
            lines(f"{call.module}.{call.function} shows no signature", recorded=call.text, found=error)
        ) from error
    faults = _faults(_recorded(call.parameters), found)
    if faults:
        raise KernelImportError(
            lines(
                f"{call.module}.{call.function} has changed since it was recorded",
                recorded=f"({call.parameters}), from {call.origin}",
                found=str(found),
                changed="; ".join(faults),
                try_="another version of the library, or --kernel with another kernel",
            )
        )


def library_function(function: str) -> Callable[..., Any]:
    """The installed function behind a recorded call, its signature checked.

    Raises:
        KernelImportError: If library or function are missing, or the signature has changed.
    """
    (call,) = (call for call in CALLS if call.function == function)
    import_provider(call.providers)
    try:
        found: Callable[..., Any] = getattr(import_module(call.module), call.function)
    except (ImportError, AttributeError) as error:
        raise KernelImportError(
            lines(f"{call.module} has no {call.function}", recorded=call.text, found=error)
        ) from error
    check_signature(call, found)
    return found
