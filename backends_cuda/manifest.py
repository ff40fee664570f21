"""The NVIDIA backend: which kernels there are, as data. Reading it imports no kernel library.

Each row is a wrapper `<op>_<library>` in `<family>_<library>.py` of this folder, or of `backends_triton` for kernels
that both vendors share. What a library was run with, and
what it takes, was measured on an H200; `status` says what holds for our wrapper. A version range ends where the
library stops fitting torch 2.11, or at the next minor release that nobody tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from halocline.hal.backend import Manifest
from halocline.hal.op import KernelSpec, KnownBad, Provider

if TYPE_CHECKING:
    from halocline.hal.op import Status

__all__ = ["MANIFEST"]

_HOME = "halocline.backends_cuda"
_SHARED = "halocline.backends_triton"  # wrappers that serve both vendors
_HOPPER = ("sm_90",)
_HOPPER_UP = ("sm_90", "sm_100", "sm_103")
_BLACKWELL = ("sm_100", "sm_103")
_ALL = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")

TRITON = (Provider(distribution="triton", versions=">=3.6,<4", module="triton"),)
SGL_KERNEL = (Provider(distribution="sglang-kernel", versions=">=0.4.3,<0.5", module="sgl_kernel"),)
TRITON_KERNELS = (Provider(distribution="sglang-kernel", versions=">=0.4.3,<0.5", module="triton_kernels"),)
DEEP_GEMM = (
    Provider(distribution="sgl-deep-gemm", versions=">=0.1.4.post1,<0.1.5", module="deep_gemm"),
    Provider(
        distribution="tokenspeed-deepgemm", versions=">=2.5.0.post20260604,<2.5.0.post20260810", module="deep_gemm"
    ),
)
# FlashMLA's homes, in order of preference. The last two own the same module: only one of them may be installed.
FLASHMLA = (
    *SGL_KERNEL,
    Provider(distribution="sgl-flash-mla", versions=">=1.0.0,<1.1", module="flash_mla"),
    Provider(
        distribution="tokenspeed-flashmla",
        versions=">=1.0.0.post20260615,<1.0.0.post20260924",
        module="flash_mla",
    ),
)
FLASHINFER = (Provider(distribution="flashinfer-python", versions=">=0.6.15,<0.7", module="flashinfer"),)
TILELANG = (Provider(distribution="tilelang", versions=">=0.1.15,<0.2", module="tilelang"),)
HUMMING = (Provider(distribution="humming-kernels", versions=">=0.1.12,<0.2", module="humming"),)
SGLANG = (Provider(distribution="sglang", versions=">=0.5.17,<0.6", module="sglang"),)

_BF16 = ("bfloat16",)
_ANY = ("bfloat16", "float32")
_PLAIN_AND_FP8 = ("fp8_block", "bfloat16", "float32")
_LATENT = {"cache_format": ("fp8_block64",), "fp8_dialect": ("ocp",)}
_INDEX = {"cache_format": ("fp8_row",), "fp8_dialect": ("ocp",)}
_CACHES = {
    "cache_format": ("fp8_block64", "fp8_row", "fp4_group32", "bfloat16", "float32"),
    "fp8_dialect": ("ocp", "none"),
}
_SINK = {"sink": ("denominator",)}
_ROPE = {"rope_pairing": ("adjacent",)}
_LINEAR = {"fp8_dialect": ("ocp", "none"), "activation": ("none", "fp8_group128")}
_EXPERTS = {**_LINEAR, "swiglu_clamp": ("gate_above_up_both",), "weight_before_down": ("yes",)}
# FlashMLA computes 64 or 128 heads; the wrapper pads what is between.
_UP_TO_128_HEADS = {"num_heads": tuple(range(1, 129)), "head_dim": (512,)}
# Executed on an H200; what was found is in benchmarks/results/h200.
_RUN: Mapping[str, Status] = {"sm_90": "run"}


def _row(
    op: str,
    library: str,
    providers: tuple[Provider, ...],
    rank: int,
    *,
    home: str = _HOME,
    code: str = "",
    requires: tuple[Provider, ...] = (),
    archs: tuple[str, ...] = _ALL,
    compute: tuple[str, ...] = _BF16,
    weights: tuple[str, ...] = (),
    semantics: Mapping[str, tuple[str, ...]] | None = None,
    traits: Mapping[str, tuple[object, ...]] | None = None,
    prepare: str = "",
    jit: bool = False,
    workspace: str = "",
    known_bad: tuple[KnownBad, ...] = (),
    graph_safe: bool = True,
    status: Status | Mapping[str, Status] = "planned",
) -> KernelSpec:
    """One kernel, with the naming rule of these folders; `code` names the wrapper where `library` does not."""
    family, _, short = op.partition(".")
    code = code or library
    return KernelSpec(
        op=op,
        name=library,
        target=f"{home}.{family}_{code}:{short}_{code}",
        prepare=f"{home}.{prepare}" if prepare else "",
        providers=providers,
        requires=requires,
        vendor="nvidia",
        archs=archs,
        formats={"compute": compute, **({"weight": weights} if weights else {})},
        traits=traits or {},
        semantics=semantics or {},
        rank=rank,
        jit=jit,
        workspace=workspace,
        known_bad=known_bad,
        graph_safe=graph_safe,
        status=status,
    )


def _triton(
    op: str,
    *,
    compute: tuple[str, ...] = _ANY,
    weights: tuple[str, ...] = (),
    semantics: Mapping[str, tuple[str, ...]] | None = None,
    traits: Mapping[str, tuple[object, ...]] | None = None,
    prepare: str = "",
    status: Status | Mapping[str, Status] = _RUN,
) -> KernelSpec:
    """A portable kernel: it serves where no library does, on both vendors."""
    return _row(
        op, "triton", TRITON, 20, home=_SHARED, compute=compute, weights=weights, semantics=semantics, traits=traits,
        prepare=prepare, jit=True, status=status,
    )  # fmt: skip


def _tilelang(
    op: str,
    *,
    weights: tuple[str, ...] = (),
    semantics: Mapping[str, tuple[str, ...]] | None = None,
    traits: Mapping[str, tuple[object, ...]] | None = None,
    prepare: str = "",
) -> KernelSpec:
    """A portable tilelang kernel: below all others, there for whoever wants to see what AMD devices can be given."""
    return _row(
        op, "tilelang", TILELANG, 15, home=_SHARED, archs=_HOPPER, weights=weights, semantics=semantics, traits=traits,
        prepare=prepare, jit=True, status=_RUN,
    )  # fmt: skip


_ATTENTION = (
    _triton("attention.plan"),
    # sgl_kernel's dsv4_fused_q_norm_rope takes heads of 128 and 192 lanes; the model's have 512.
    _triton("attention.prepare_query", semantics=_ROPE),
    _row(
        "attention.sparse_decode", "flashmla", FLASHMLA, 80, archs=_HOPPER_UP, traits=_UP_TO_128_HEADS,
        semantics={**_SINK, **_LATENT}, workspace="split buffers of (132 + batch) * heads * 2 KB a call",
        status=_RUN,
    ),
    _row(
        "attention.sparse_decode", "flashinfer_trtllm", FLASHINFER, 60, archs=_BLACKWELL, traits=_UP_TO_128_HEADS,
        semantics={**_SINK, **_LATENT},
    ),
    _triton("attention.sparse_decode", semantics={**_SINK, **_CACHES}),
    _tilelang("attention.sparse_decode", semantics={**_SINK, **_LATENT}, traits={"head_dim": (512,)}),
    _row(
        "attention.sparse_prefill", "flashmla", FLASHMLA, 80, archs=_HOPPER_UP, status=_RUN,
        traits={**_UP_TO_128_HEADS, "prefill_layout": ("ragged",)}, semantics={**_SINK, **_LATENT},
        workspace="bf16 rows of the requests of a chunk",
    ),
    _triton("attention.sparse_prefill", semantics={**_SINK, **_CACHES}, traits={"prefill_layout": ("paged", "ragged")}),
    _tilelang(
        "attention.sparse_prefill", semantics={**_SINK, **_LATENT},
        traits={"head_dim": (512,), "prefill_layout": ("paged", "ragged")},
    ),
    _row(
        "attention.output", "deep_gemm", DEEP_GEMM, 60, archs=_HOPPER_UP, weights=("fp8_block",), jit=True,
        semantics={**_ROPE, "fp8_dialect": ("ocp",)}, prepare="attention_deep_gemm:prepare_output_deep_gemm",
        status=_RUN,
    ),
    _triton(
        "attention.output", weights=_PLAIN_AND_FP8, semantics={**_ROPE, "fp8_dialect": ("ocp", "none")},
        prepare="attention_triton:prepare_output_triton",
    ),
)  # fmt: skip

_CACHE = (
    _row("kv_cache.allocate", "torch", (), 20, home=_SHARED, compute=_ANY, status=_RUN),
    # sgl_kernel's dsv4_fused_k_norm_rope_flashmla has no row. By its source it rounds to E4M3 without rounding to
    # bfloat16 first, which is 1.52e-2 from the contract for 1025 tokens, and the tolerance is 1.5e-2; and it looks at
    # no slot, so that padding (-1) would be stored in front of the cache.
    _triton("kv_cache.insert_window", semantics={**_ROPE, **_CACHES}),
    _triton("kv_cache.read_rows", semantics=_CACHES),
    _triton("kv_cache.write_rows", semantics=_CACHES),
    _row("compressor.allocate_state", "torch", (), 20, home=_SHARED, compute=_ANY, status=_RUN),
    _triton("compressor.insert", semantics={**_ROPE, **_CACHES}, traits={"ratio": (4, 128)}),
)  # fmt: skip

_INDEXER = (
    # sgl_kernel's small kernels are there by name, below ours, which take 1.5 to 2 us a launch on an H200. Theirs were
    # timed alone in a graph, at 10 us with its start, and never beside ours.
    _row(
        "indexer.prepare_query", "sgl_kernel", SGL_KERNEL, 15, archs=_HOPPER_UP, traits={"index_width": (128,)},
        semantics={**_ROPE, "index_query": ("fp8_row",), "fp8_dialect": ("ocp",)}, status=_RUN,
    ),
    _triton(
        "indexer.prepare_query",
        semantics={**_ROPE, "index_query": ("none", "fp4_group32", "fp8_row"), "fp8_dialect": ("ocp", "none")},
    ),
    _row(
        "indexer.logits", "deep_gemm", DEEP_GEMM, 60, archs=_HOPPER_UP, status=_RUN, semantics=_INDEX, jit=True,
        traits={"index_heads": (32, 64), "index_width": (32, 64, 128)},
    ),
    _triton("indexer.logits", semantics=_CACHES),
    _tilelang("indexer.logits", semantics=_INDEX, traits={"index_width": (64, 128)}),
    # Its extension takes minutes to compile and is no part of the wheel: below our own until someone brings it built.
    _row("indexer.select", "flashinfer", FLASHINFER, 10, archs=_HOPPER_UP, jit=True),
    _triton("indexer.select"),
)  # fmt: skip

_STREAMS = (
    _row(
        "hyper_connection.read", "flashinfer", FLASHINFER, 60, requires=DEEP_GEMM[:1], archs=_HOPPER_UP,
        status=_RUN, traits={"num_streams": (4,)}, jit=True,
    ),
    _triton("hyper_connection.read"),
    _tilelang("hyper_connection.read", traits={"num_streams": (4,)}),
    _row(
        "hyper_connection.write", "flashinfer", FLASHINFER, 60, archs=_HOPPER_UP, traits={"num_streams": (4,)},
        status=_RUN, jit=True,
    ),
    _triton("hyper_connection.write"),
    _tilelang("hyper_connection.write", traits={"num_streams": (4,)}),
    _triton("hyper_connection.head"),
    # One kernel under two names, below ours for the reason of sgl_kernel's index query.
    _row("norm.rms_norm", "sgl_kernel", SGL_KERNEL, 15, archs=_HOPPER_UP, status=_RUN),
    _row("norm.rms_norm", "flashinfer", FLASHINFER, 10, archs=_HOPPER_UP, jit=True, status=_RUN),
    _triton("norm.rms_norm"),
)  # fmt: skip


def _collective(op: str) -> KernelSpec:
    """An exchange by torch.distributed, whose library is NCCL."""
    return _row(
        f"collective.{op}", "nccl", (), 60, home=_SHARED, code="torch", status=_RUN, compute=_ANY,
        graph_safe=op != "all_to_all",
    )  # fmt: skip


_DENSE = (
    _row(
        "gemm.linear", "deep_gemm", DEEP_GEMM, 60, archs=_HOPPER_UP, weights=_PLAIN_AND_FP8, semantics=_LINEAR,
        status=_RUN, prepare="gemm_deep_gemm:prepare_linear_deep_gemm", jit=True,
    ),
    _triton(
        "gemm.linear", weights=(*_PLAIN_AND_FP8, "mxfp4", "nvfp4"), semantics=_LINEAR,
        prepare="gemm_triton:prepare_linear_triton",
    ),
    _tilelang(
        "gemm.linear", weights=_PLAIN_AND_FP8, semantics=_LINEAR, prepare="gemm_tilelang:prepare_linear_tilelang",
    ),
    _row(
        "collective.all_reduce", "symm_mem", TRITON, 70, compute=_ANY, traits={"world_size": tuple(range(2, 9))},
        jit=True, status=_RUN,
    ),
    *(_collective(op) for op in ("all_gather", "all_reduce", "all_to_all", "broadcast")),
    _triton("sampling.sample"),
)  # fmt: skip


# Rows of hidden states and experts by local number: every token, or those that `collective.all_to_all` brought.
_TOKENS = ("none", "all_to_all")


def _experts(
    runner: str,
    providers: tuple[Provider, ...],
    rank: int,
    weights: tuple[str, ...],
    a2a: tuple[str, ...],
    archs: tuple[str, ...] = _HOPPER_UP,
    known_bad: tuple[KnownBad, ...] = (),
    status: Status | Mapping[str, Status] = "planned",
    home: str = _HOME,
) -> KernelSpec:
    """A runner of the routed experts, keyed by weight format, all-to-all kind and architecture."""
    return _row(
        "moe.experts", runner, providers, rank, home=home, archs=archs, weights=weights, traits={"a2a": a2a},
        semantics=_EXPERTS, prepare=f"moe_{runner}:prepare_experts_{runner}", jit=True, known_bad=known_bad,
        status=status,
    )  # fmt: skip


_MIXTURE = (
    _triton("moe.route_by_hash", semantics={"scoring": ("sqrtsoftplus",)}),
    _triton("moe.route_by_score", semantics={"scoring": ("sqrtsoftplus",)}),
    _triton("moe.swiglu", semantics={"swiglu_clamp": ("gate_above_up_both",)}),
    _experts("triton_kernels", TRITON_KERNELS, 70, ("mxfp4",), _TOKENS, _HOPPER, status=_RUN),
    _experts("humming", HUMMING, 65, ("mxfp4", "fp8_block"), (*_TOKENS, "deepep"), _HOPPER),
    _experts("deep_gemm", DEEP_GEMM, 60, ("fp8_block",), (*_TOKENS, "deepep")),
    # Its SM90 extension takes about 45 minutes to build: only where it comes prebuilt, by name.
    _experts(
        "flashinfer_cutlass", FLASHINFER, 15, ("mxfp4", "fp8_block", "nvfp4", "bfloat16"), (*_TOKENS, "flashinfer")
    ),
    _experts("flashinfer_mxfp4", FLASHINFER, 55, ("mxfp4",), (*_TOKENS, "flashinfer")),
    _experts(
        "flashinfer_trtllm", FLASHINFER, 75, ("mxfp4", "fp8_block", "nvfp4"), (*_TOKENS, "flashinfer"), _BLACKWELL
    ),
    _experts("marlin", SGLANG, 50, ("mxfp4",), _TOKENS, ("sm_80", "sm_86", "sm_89", "sm_90")),
    _experts(
        "triton",
        TRITON,
        20,
        ("mxfp4", "fp8_block", "nvfp4", "bfloat16"),
        (*_TOKENS, "deepep", "flashinfer"),
        _ALL,
        status=_RUN,
        home=_SHARED,
    ),
)

MANIFEST = Manifest(
    name="cuda",
    vendor="nvidia",
    runtime=f"{_HOME}.runtime:RUNTIME",
    specs=(*_ATTENTION, *_CACHE, *_INDEXER, *_STREAMS, *_DENSE, *_MIXTURE),
)
