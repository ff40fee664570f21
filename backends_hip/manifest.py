"""The AMD backend: which kernels there are, as data. Reading it imports no kernel library.

Each row is a wrapper `<op>_<library>` in `<family>_<library>.py` of this folder, or of `backends_triton` for kernels
that both vendors share. Portable Triton kernels come first: they are interpreted, compiled for these architectures and
run on NVIDIA, which nobody can do with all of the others. tilelang, aiter and tokenspeed are chosen by name
(`HALOCLINE_HIP_BACKEND`, `--kernel`). No row ran on AMD silicon yet; docs/amd.md says what was done instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from halocline.hal.backend import Manifest
from halocline.hal.op import KernelSpec, KnownBad, Provider

if TYPE_CHECKING:
    from halocline.hal.op import Status

__all__ = ["AITER", "MANIFEST", "TILELANG", "TOKENSPEED", "TRITON"]

_HOME = "halocline.backends_hip"
_SHARED = "halocline.backends_triton"  # wrappers that serve both vendors
_CDNA = ("gfx90a", "gfx942", "gfx950")
_CDNA3_UP = ("gfx942", "gfx950")

TRITON = (
    Provider(distribution="triton", versions=">=3.6,<4", module="triton"),
    Provider(distribution="pytorch-triton-rocm", versions=">=3.6,<4", module="triton"),
)
TILELANG = (Provider(distribution="tilelang", versions=">=0.1.15,<0.2", module="tilelang"),)
# The release on PyPI predates this model: its kernels came later, in the tree that ROCm images carry.
AITER = (Provider(distribution="amd-aiter", versions=">=0.1.8", module="aiter"),)
TOKENSPEED = (Provider(distribution="tokenspeed-kernel-amd", versions=">=0.1.4,<0.2", module="tokenspeed_kernel_amd"),)

_BF16 = ("bfloat16",)
_ANY = ("bfloat16", "float32")
_PLAIN_AND_FP8 = ("fp8_block", "bfloat16", "float32")
_CACHES = {
    "cache_format": ("fp8_block64", "fp8_row", "fp4_group32", "bfloat16", "float32"),
    "fp8_dialect": ("ocp", "fnuz", "none"),
}
_LATENT = {"cache_format": ("fp8_block64",), "fp8_dialect": ("ocp", "fnuz")}
_SINK = {"sink": ("denominator",)}
_ROPE = {"rope_pairing": ("adjacent",)}
_LINEAR = {"fp8_dialect": ("ocp", "none"), "activation": ("none", "fp8_group128")}
_EXPERTS = {**_LINEAR, "swiglu_clamp": ("gate_above_up_both",), "weight_before_down": ("yes",)}

# Said of another kernel of this kind; ours runs a token's rounds in one thread. Refused until one was seen right there.
_TILELANG_STREAMS = KnownBad(
    reason="threads are split at 32 of a 64-lane wave: activations come out sqrt(2) too large",
    source="vllm-project/vllm#56342, vllm-project/vllm#45698",
    archs=("gfx942",),
)
_LIKE_HOPPER = KnownBad(
    reason="it gates on the capability number, and (9, 0) of this device reads as another vendor's",
    source="sgl-project/sglang#27972",
    archs=("gfx90a",),
)
# Said of the library's own path through FP8 rows; ours hands it bfloat16 rows. Refused until it was seen right there.
_MIXED_DIALECTS = KnownBad(
    reason="FP8 bytes written as OCP are read as FNUZ",
    source="vllm-project/vllm#45681",
    archs=("gfx942",),
)
_LONG_CONTEXT = KnownBad(
    reason="answers degrade at long contexts",
    source="sgl-project/sglang#36390",
    archs=("gfx942",),
)


def _row(
    op: str,
    library: str,
    providers: tuple[Provider, ...],
    rank: int,
    *,
    home: str = _HOME,
    code: str = "",
    archs: tuple[str, ...] = _CDNA3_UP,
    compute: tuple[str, ...] = _BF16,
    weights: tuple[str, ...] = (),
    semantics: Mapping[str, tuple[str, ...]] | None = None,
    traits: Mapping[str, tuple[object, ...]] | None = None,
    prepare: str = "",
    jit: bool = True,
    known_bad: tuple[KnownBad, ...] = (),
    graph_safe: bool = True,
    status: Status | Mapping[str, Status] = "not_run",
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
        vendor="amd",
        archs=archs,
        formats={"compute": compute, **({"weight": weights} if weights else {})},
        traits=traits or {},
        semantics=semantics or {},
        rank=rank,
        jit=jit,
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
) -> KernelSpec:
    """A portable kernel."""
    return _row(
        op, "triton", TRITON, 20, home=_SHARED, archs=_CDNA, compute=compute, weights=weights, semantics=semantics,
        traits=traits, prepare=prepare,
    )  # fmt: skip


def _tilelang(
    op: str,
    *,
    weights: tuple[str, ...] = (),
    known_bad: tuple[KnownBad, ...] = (),
    semantics: Mapping[str, tuple[str, ...]] | None = None,
    traits: Mapping[str, tuple[object, ...]] | None = None,
    prepare: str = "",
) -> KernelSpec:
    """A tilelang kernel of ours."""
    return _row(
        op, "tilelang", TILELANG, 15, home=_SHARED, archs=_CDNA, weights=weights, semantics=semantics, traits=traits,
        prepare=prepare, known_bad=(_LIKE_HOPPER, *known_bad),
    )  # fmt: skip


def _aiter(
    op: str,
    *,
    archs: tuple[str, ...] = _CDNA3_UP,
    weights: tuple[str, ...] = (),
    semantics: Mapping[str, tuple[str, ...]] | None = None,
    traits: Mapping[str, tuple[object, ...]] | None = None,
    prepare: str = "",
    known_bad: tuple[KnownBad, ...] = (),
) -> KernelSpec:
    """A kernel of AMD's own library."""
    return _row(
        op, "aiter", AITER, 10, archs=archs, weights=weights, semantics=semantics, traits=traits, prepare=prepare,
        known_bad=known_bad,
    )  # fmt: skip


_ATTENTION = (
    _triton("attention.plan"),
    _triton("attention.prepare_query", semantics=_ROPE),
    _triton("attention.sparse_decode", semantics={**_SINK, **_CACHES}),
    _tilelang("attention.sparse_decode", semantics={**_SINK, **_LATENT}, traits={"head_dim": (512,)}),
    _aiter(
        "attention.sparse_decode", semantics={**_SINK, **_LATENT}, traits={"head_dim": (512,)},
        known_bad=(_MIXED_DIALECTS, _LONG_CONTEXT),
    ),
    _triton("attention.sparse_prefill", semantics={**_SINK, **_CACHES}, traits={"prefill_layout": ("paged", "ragged")}),
    _tilelang(
        "attention.sparse_prefill", semantics={**_SINK, **_LATENT},
        traits={"head_dim": (512,), "prefill_layout": ("paged", "ragged")},
    ),
    # Elsewhere than on gfx950 the library's function stops on sinks of more than one head (read in its tree).
    _aiter(
        "attention.sparse_prefill", archs=("gfx950",), semantics={**_SINK, **_LATENT},
        traits={"head_dim": (512,), "prefill_layout": ("ragged",)},
    ),
    _row(
        "attention.sparse_prefill", "tokenspeed", TOKENSPEED, 5, archs=("gfx950",), semantics={**_SINK, **_LATENT},
        traits={"head_dim": (512,), "prefill_layout": ("ragged",)},
    ),
    _triton(
        "attention.output", weights=_PLAIN_AND_FP8, semantics={**_ROPE, "fp8_dialect": ("ocp", "none")},
        prepare="attention_triton:prepare_output_triton",
    ),
)  # fmt: skip

_CACHE = (
    _row("kv_cache.allocate", "torch", (), 20, home=_SHARED, archs=_CDNA, compute=_ANY, jit=False),
    _triton("kv_cache.insert_window", semantics={**_ROPE, **_CACHES}),
    _triton("kv_cache.read_rows", semantics=_CACHES),
    _triton("kv_cache.write_rows", semantics=_CACHES),
    _row("compressor.allocate_state", "torch", (), 20, home=_SHARED, archs=_CDNA, compute=_ANY, jit=False),
    _triton("compressor.insert", semantics={**_ROPE, **_CACHES}, traits={"ratio": (4, 128)}),
)

_INDEXER = (
    _triton(
        "indexer.prepare_query",
        semantics={
            **_ROPE,
            "index_query": ("none", "fp4_group32", "fp8_row"),
            "fp8_dialect": ("ocp", "fnuz", "none"),
        },
    ),
    _triton("indexer.logits", semantics=_CACHES),
    _tilelang(
        "indexer.logits",
        semantics={"cache_format": ("fp8_row",), "fp8_dialect": ("ocp", "fnuz")},
        traits={"index_width": (64, 128)},
    ),
    _aiter(
        "indexer.logits",
        semantics={"cache_format": ("fp8_row",), "fp8_dialect": ("ocp", "fnuz")},
        traits={"index_width": (128,)},
        known_bad=(_MIXED_DIALECTS,),
    ),
    _triton("indexer.select"),
    _aiter("indexer.select"),
)

_STREAMS = (
    _triton("hyper_connection.read"),
    _tilelang("hyper_connection.read", traits={"num_streams": (4,)}, known_bad=(_TILELANG_STREAMS,)),
    _aiter("hyper_connection.read", traits={"num_streams": (4,)}),
    _triton("hyper_connection.write"),
    _tilelang("hyper_connection.write", traits={"num_streams": (4,)}, known_bad=(_TILELANG_STREAMS,)),
    _aiter("hyper_connection.write", traits={"num_streams": (4,)}),
    _triton("hyper_connection.head"),
    _triton("norm.rms_norm"),
)


def _collective(op: str) -> KernelSpec:
    """An exchange by torch.distributed, whose library is RCCL."""
    return _row(
        f"collective.{op}", "rccl", (), 60, home=_SHARED, code="torch", archs=_CDNA, jit=False, compute=_ANY,
        graph_safe=op != "all_to_all",
    )  # fmt: skip


_DENSE = (
    _triton(
        "gemm.linear", weights=(*_PLAIN_AND_FP8, "mxfp4", "nvfp4"), semantics=_LINEAR,
        prepare="gemm_triton:prepare_linear_triton",
    ),
    _tilelang(
        "gemm.linear", weights=_PLAIN_AND_FP8, semantics=_LINEAR, prepare="gemm_tilelang:prepare_linear_tilelang",
    ),
    _aiter(
        "gemm.linear", weights=_PLAIN_AND_FP8, semantics=_LINEAR, prepare="gemm_aiter:prepare_linear_aiter",
    ),
    *(_collective(op) for op in ("all_gather", "all_reduce", "all_to_all", "broadcast")),
    _triton("sampling.sample"),
)  # fmt: skip

# Rows of hidden states and experts by local number: every token, or those that `collective.all_to_all` brought.
_TOKENS = ("none", "all_to_all")

_MIXTURE = (
    _triton("moe.route_by_hash", semantics={"scoring": ("sqrtsoftplus",)}),
    _triton("moe.route_by_score", semantics={"scoring": ("sqrtsoftplus",)}),
    _aiter("moe.route_by_score", semantics={"scoring": ("sqrtsoftplus",)}),
    _triton("moe.swiglu", semantics={"swiglu_clamp": ("gate_above_up_both",)}),
    _triton(
        "moe.experts", weights=("mxfp4", "fp8_block", "nvfp4", "bfloat16"), semantics=_EXPERTS,
        traits={"a2a": (*_TOKENS, "mori")}, prepare="moe_triton:prepare_experts_triton",
    ),
    # It weighs an expert's result after the down product: models that weigh before it do not get it.
    _aiter(
        "moe.experts", weights=("fp8_block",), semantics={**_EXPERTS, "weight_before_down": ("no",)},
        traits={"a2a": _TOKENS}, prepare="moe_aiter:prepare_experts_aiter",
    ),
)  # fmt: skip

MANIFEST = Manifest(
    name="hip",
    vendor="amd",
    runtime=f"{_SHARED}.runtime:RUNTIME",
    specs=(*_ATTENTION, *_CACHE, *_INDEXER, *_STREAMS, *_DENSE, *_MIXTURE),
)
