"""Stand-ins for what compiles at the first call: Triton's compiler, and libraries of which each call notes its key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from halocline.backends_cuda import (
    attention_deep_gemm,
    attention_flashmla,
    gemm_deep_gemm,
    hyper_connection_flashinfer,
    indexer_deep_gemm,
    moe_triton_kernels,
)
from halocline.backends_cuda.flash_mla_library import FlashMla
from halocline.hal.backend import load_manifests
from halocline.hal.formats import Weight
from halocline.hal.ops import Ops
from halocline.hal.runtime import prepare_name
from halocline.kernels_portable.aot import Launch, compile_key

SOME_TOKEN = 5


@dataclass(eq=False)
class Compiler:
    """Keys of all launches so far; `since` are those that came after `ready`."""

    target: GPUTarget
    known: set[tuple[Any, ...]] = field(default_factory=set)
    since: list[tuple[Any, ...]] = field(default_factory=list)
    is_ready: bool = False

    def take(self, launch: Launch) -> None:
        if launch.name == "pick_tokens":  # its result is an index on the host's side too
            launch.arguments["out_ptr"].fill_(SOME_TOKEN)
        if launch.name == "select_entries":  # and so is this one's, in a gather of pages
            launch.arguments["slots_ptr"].fill_(-1)
        self.note(compile_key(launch, self.target))

    def note(self, key: tuple[Any, ...]) -> None:
        if key not in self.known:
            self.known.add(key)
            if self.is_ready:
                self.since.append(key)


def kernels_called(names: dict[str, str]) -> dict[str, Callable[..., Any]]:
    """Kernels of NVIDIA's manifest: of an op in `names` the one named there, else `triton` or one of torch."""
    kernels: dict[str, Callable[..., Any]] = {}

    def load(path: str) -> Callable[..., Any]:
        module, _, name = path.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    (manifest,) = (manifest for manifest in load_manifests() if manifest.name == "cuda")
    for spec in manifest.specs:
        found = spec.name in ("torch", "nccl") and spec.op not in kernels
        if spec.name == names.get(spec.op, "triton") or found:
            kernels[spec.op] = load(spec.target)
            if spec.prepare:
                kernels[prepare_name(spec.op)] = load(spec.prepare)
    return kernels


@dataclass(eq=False)
class DeepGemm:
    """DeepGEMM's calls: each notes what the library compiles by, and computes nothing."""

    compiler: Compiler

    def fp8_gemm_nt(self, a: Any, b: Any, d: Tensor, **_: Any) -> None:
        self.compiler.note(("fp8_gemm_nt", tuple(b[0].shape), len(d)))

    def fp8_einsum(self, text: str, a: Any, b: Any, d: Tensor, **_: Any) -> None:
        self.compiler.note(("fp8_einsum", tuple(b[0].shape), len(d)))

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, lengths: Tensor, page_rows: int, num_sms: int) -> Tensor:
        self.compiler.note(("metadata", -(-len(lengths) // 32)))
        return torch.zeros((num_sms + 1, 2), dtype=torch.int32)

    def fp8_paged_mqa_logits(self, q: Tensor, *arguments: Any, **_: Any) -> Tensor:
        self.compiler.note(("fp8_paged_mqa_logits",))
        return torch.empty(len(q), -(-arguments[-1] // 256) * 256)[:, : arguments[-1]]

    def fp8_mqa_logits(self, q: Tensor, keys: Any, *_: Any, **__: Any) -> Tensor:
        self.compiler.note(("fp8_mqa_logits",))
        return torch.empty(len(q), -(-len(keys[0]) // 256) * 256)[:, : len(keys[0])]

    def tf32_hc_prenorm_gemm(self, *_: Any, num_splits: int) -> None:
        self.compiler.note(("tf32_hc_prenorm_gemm", num_splits))


class Mhc:
    """FlashInfer's calls, which are compiled beforehand."""

    def mhc_pre_big_fuse(self, logits: Tensor, squares: Tensor, streams: Tensor, *_: Any) -> tuple[Tensor, ...]:
        tokens, count, hidden = streams.shape
        mixed = torch.empty(tokens, hidden, dtype=streams.dtype)
        return torch.empty(tokens, count, 1), torch.empty(tokens, count, count), mixed

    def mhc_post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return torch.empty_like(streams)


class FlashMlaModule:
    """FlashMLA's calls, which are compiled beforehand."""

    def flash_mla_with_kvcache(self, q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty(len(q), q.shape[2], 1)

    def flash_mla_sparse_fwd(self, q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None, Tensor]:
        return torch.empty_like(q), None, torch.empty(q.shape[:2])

    def get_mla_metadata(self) -> tuple[SimpleNamespace, None]:
        return SimpleNamespace(), None


def stand_in_for_triton_kernels(compiler: Compiler) -> SimpleNamespace:
    """The library's products: tiles by the mean rows of an expert, apart for multiples of 16 blocks."""

    def matmul(x: Tensor, width: int, bias: None, routed: Any, **options: Any) -> Tensor:
        mean = max(1, routed.rows // routed.experts)
        tile = 128 if mean > 64 else max(16, min(1 << (2 * mean - 1).bit_length(), 64))
        compiler.note(("matmul_ogs", width, tile, routed.n_blocks(routed.rows, tile) % 16 == 0))
        kind = torch.float32 if "gather_indx" in options else torch.bfloat16
        return torch.empty(routed.rows, width, dtype=kind)

    def routing(gates: Tensor, counts: Tensor, experts: int, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(rows=len(gates), experts=experts)

    blocks = type("Blocks", (), {"__init__": lambda *_: None, "block_sizes": lambda: [16, 32, 64, 128]})
    products = SimpleNamespace(GatherIndx=SimpleNamespace, RoutingData=routing, matmul_ogs=matmul)
    tensors = SimpleNamespace(RaggedTensorMetadata=blocks)
    return SimpleNamespace(products=products, tensors=tensors, constrain=lambda flags: None)


LIBRARIES = {
    "attention.output": "deep_gemm",
    "attention.sparse_decode": "flashmla",
    "attention.sparse_prefill": "flashmla",
    "gemm.linear": "deep_gemm",
    "hyper_connection.read": "flashinfer",
    "hyper_connection.write": "flashinfer",
    "indexer.logits": "deep_gemm",
    "moe.experts": "triton_kernels",
}


def library_ops(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Ops:
    """The kernels over libraries, with stand-ins for these, and portable ones where there is none."""

    def prepare_experts(gate_up: Weight, down: Weight, *, activation: str) -> object:
        return moe_triton_kernels.TritonKernelsExperts(
            num_experts=gate_up.shape[0], hidden=gate_up.shape[-1], rounds_input=activation != "none",
            gate_up=gate_up.shape[1], gate_up_precision=None, down=down.shape[1], down_precision=None,
        )  # fmt: skip

    experts = stand_in_for_triton_kernels(compiler)
    deep_gemm, mhc, flash_mla = DeepGemm(compiler), Mhc(), FlashMlaModule()
    for name, library in {"deep_gemm": deep_gemm, "flashinfer.mhc": mhc, "sgl_kernel.flash_mla": flash_mla}.items():
        monkeypatch.setitem(sys.modules, name, library)
    attention = FlashMla(module=flash_mla, options={}, prefill_lse_unit=1.0)
    for module in (gemm_deep_gemm, attention_deep_gemm, indexer_deep_gemm, hyper_connection_flashinfer):
        monkeypatch.setattr(module, "deep_gemm", lambda: deep_gemm)
    monkeypatch.setattr(hyper_connection_flashinfer, "_mhc", lambda: mhc)
    monkeypatch.setattr(attention_flashmla, "flash_mla", lambda: attention)
    monkeypatch.setattr(attention_flashmla, "num_schedule_parts", lambda heads, device: 132)
    monkeypatch.setattr(moe_triton_kernels, "_library", lambda: experts)
    return Ops({**kernels_called(LIBRARIES), "moe.prepare_experts": prepare_experts})
