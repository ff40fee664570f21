"""The adapters over sgl_kernel's small kernels and FlashInfer's norm against the reference.

Stand-ins compute what the libraries' kernels do, by other formulas than ours, and check what those leave unchecked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_cuda import indexer_sgl_kernel, norm_flashinfer, norm_sgl_kernel, sgl_kernel_library
from halocline.backends_cuda.manifest import MANIFEST as CUDA
from halocline.backends_reference.indexer import prepare_query_reference
from halocline.backends_reference.manifest import MANIFEST as REFERENCE
from halocline.backends_reference.norm import rms_norm_reference
from halocline.hal.backend import Manifest
from halocline.hal.errors import ShapeError
from halocline.hal.inventory import Inventory
from halocline.hal.offline import Workbench, load_cases, takes
from halocline.hal.ops.indexer import IndexQuery
from halocline.hal.ops.rope import RopeTable
from halocline.hal.parity import judge
from halocline.hal.profiles import profile


class Library:
    """The kernels, under the names and with the arguments of both libraries.

    Attributes:
        norms: How many norms ran.
        positions: Of each index query, the tensors that it was given.
    """

    def __init__(self) -> None:
        self.norms = 0
        self.positions: list[Tensor] = []

    @property
    def sgl_kernel(self) -> Any:
        """Operators `torch.ops.sgl_kernel`."""
        query = SimpleNamespace(default=self.index_query)
        return SimpleNamespace(
            rmsnorm=SimpleNamespace(default=self.rms_norm), dsv4_fused_q_indexer_rope_hadamard_quant=query
        )

    @property
    def flashinfer_norm(self) -> Any:
        """Module `flashinfer.norm`."""

        def rmsnorm(
            input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
        ) -> Tensor:
            assert out is not None
            assert enable_pdl is not None
            self.rms_norm(out, input, weight, eps, enable_pdl)
            return out

        return SimpleNamespace(rmsnorm=rmsnorm)

    def rms_norm(self, output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
        assert input.dim() == 2, "on three axes FlashInfer runs another kernel"
        assert input.numel() > 0, "a grid without programs is an error"
        assert {t.dtype for t in (output, input, weight)} == {torch.bfloat16}, "the gain's type is not looked at"
        assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (output, input, weight))
        assert enable_pdl is False
        self.norms += 1
        x = input.double()
        output.copy_(x / (x.norm(dim=1, keepdim=True) ** 2 / x.shape[1] + eps).sqrt() * weight.double())

    def index_query(
        self, q_input: Tensor, q_fp8: Tensor, weight: Tensor, weights_out: Tensor, weight_scale: float,
        freqs_cis: Tensor, positions: Tensor,
    ) -> None:  # fmt: skip
        num_tokens, num_heads, width = q_input.shape
        assert (q_input.dtype, q_fp8.dtype, width) == (torch.bfloat16, torch.float8_e4m3fn, 128)
        assert (weight.dtype, weight.shape) == (torch.bfloat16, (num_tokens, num_heads)), "its bytes are taken as such"
        assert (weights_out.dtype, weights_out.shape) == (torch.float32, (num_tokens, num_heads, 1))
        assert (freqs_cis.dtype, freqs_cis.shape[1]) == (torch.float32, 64)
        assert (positions.dtype, len(positions)) == (torch.int32, num_tokens)
        assert all(t.is_contiguous() for t in (q_input, q_fp8, weight, weights_out, freqs_cis, positions))
        assert q_input.data_ptr() % 8 == 0
        assert num_tokens > 0
        assert bool(((positions >= 0) & (positions < len(freqs_cis))).all()), "reads beside the table"
        self.positions.append(positions)
        tail = torch.view_as_complex(q_input[..., 64:].double().unflatten(-1, (32, 2)).contiguous())
        turn = torch.view_as_complex(freqs_cis.double().unflatten(-1, (32, 2)).contiguous())[positions.long()]
        turned = torch.view_as_real(tail * turn[:, None]).flatten(-2)
        mixed = torch.cat((q_input[..., :64].double(), turned), -1) @ sylvester(128) / 128**0.5
        scale = mixed.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        q_fp8.copy_((mixed / scale).float().nan_to_num(448.0).to(torch.float8_e4m3fn))
        weights_out.copy_(weight[..., None].double() * weight_scale * scale)


def sylvester(width: int) -> Tensor:
    """Lane i of row j is -1 to the number of ones that both have in binary."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for i in range(width)] for j in range(width)]).double()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    for module in (norm_sgl_kernel, indexer_sgl_kernel):
        monkeypatch.setattr(module, "sgl_kernel_ops", lambda: found.sgl_kernel)
    monkeypatch.setattr(norm_flashinfer, "_norm", lambda: found.flashinfer_norm)
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- on the inputs of the ops ------------------------------------------------------------------------------------

ROWS = [("norm.rms_norm", "sgl_kernel"), ("norm.rms_norm", "flashinfer"), ("indexer.prepare_query", "sgl_kernel")]


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_the_contracts_tolerance_holds_on_every_input(library: Library, op: str, name: str) -> None:
    """What a row states is within the tolerance, of models' sizes too, or refused for one of two reasons."""
    (row,) = (spec for spec in CUDA.specs if (spec.op, spec.name) == (op, name))
    here = replace(row, vendor="cpu", archs=(), providers=())
    bench = Workbench(
        manifests=(REFERENCE, Manifest(name="tested", vendor="cpu", specs=(here,))),
        device=profile("cpu").device,
        inventory=Inventory.of(()),
    )
    found = [judge(bench, here, case) for case in load_cases(bench.manifests, op) if takes(here, case)]
    refused = [result for result in found if result.refused]
    assert all("gain of torch.float32" in result.refused for result in refused)
    wrong = [result for result in found if not result.refused and not result.within]
    assert wrong == []
    assert len(found) - len(refused) >= 7


# ---- norm --------------------------------------------------------------------------------------------------------

Norm = Callable[..., Tensor]
NORMS = [norm_sgl_kernel.rms_norm_sgl_kernel, norm_flashinfer.rms_norm_flashinfer]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("part", ["columns", "one element on", "streams", "one row"])
def test_rows_may_lie_anywhere(library: Library, norm: Norm, part: str) -> None:
    buffer, gain_D = normal(6, 3, 136).bfloat16(), (1 + normal(129, seed=1)).bfloat16()[1:]
    x = {
        "columns": buffer[:, 0, 5:133],
        "one element on": buffer.flatten()[1:1281].view(10, 128),
        "streams": buffer[:, :, :128],
        "one row": buffer[0, 0, :128],
    }[part]
    before = x.clone()
    found, expected = norm(x, gain_D, eps=0.5), rms_norm_reference(x, gain_D, eps=0.5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=1.6e-2, rtol=1e-2)
    assert torch.equal(x, before)
    assert library.norms == 1


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_no_rows_are_no_launch(library: Library, norm: Norm, shape: tuple[int, ...]) -> None:
    found = norm(torch.empty(shape, dtype=torch.bfloat16), torch.ones(64).bfloat16(), eps=1e-6)
    assert (found.shape, found.dtype, library.norms) == (torch.Size(shape), torch.bfloat16, 0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "gain", "lanes", "text"),
    [
        (torch.bfloat16, torch.float32, 64, "gain of torch.float32"),
        (torch.float32, torch.float32, 64, "rows of torch.float32"),
        (torch.bfloat16, torch.bfloat16, 32, "gain of shape"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(
    library: Library, norm: Norm, rows: torch.dtype, gain: torch.dtype, lanes: int, text: str
) -> None:
    with pytest.raises(ShapeError, match=text):
        norm(torch.ones(2, 64, dtype=rows), torch.ones(lanes, dtype=gain), eps=1e-6)
    assert library.norms == 0


def test_rows_behind_32_bits_are_refused(library: Library) -> None:
    x = torch.ones(1, 1, dtype=torch.bfloat16).expand(2**26, 64)
    with pytest.raises(ShapeError, match=r"fewer than 2\*\*32"):
        norm_sgl_kernel.rms_norm_sgl_kernel(x, torch.ones(64).bfloat16(), eps=1e-6)


# ---- index queries -----------------------------------------------------------------------------------------------

ROPE = RopeTable(cos_sin_PR=torch.polar(torch.ones(2048, 32), normal(2048, 32, seed=2)).view(torch.float32))


def weighted(query: IndexQuery) -> Tensor:
    """What scores are made of: each head's query times its weight."""
    return query.q_THI.float() * query.weights_TH[..., None]


def close(found: Tensor, expected: Tensor) -> bool:
    """Within the rounding to E4M3, which is 3e-2 of a row, and that of bfloat16 in front of it."""
    return float((found - expected).norm()) < 5e-2 * float(expected.norm())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [1, 16, 64])
def test_index_query(library: Library, make_step: Callable[..., Any], kind: torch.dtype, num_heads: int) -> None:
    """Of a view of wider rows, with head weights that lie the other way round."""
    plan = make_step([300, 700], [1, 90], num_decode=1).plan
    q_THI, weights_TH = normal(91, num_heads, 136).bfloat16()[..., 3:131], normal(num_heads, 91, seed=1).to(kind).T
    found = indexer_sgl_kernel.prepare_query_sgl_kernel(plan, q_THI, weights_TH, ROPE, rounding="fp8_row")
    expected = prepare_query_reference(plan, q_THI, weights_TH, ROPE, rounding="fp8_row")
    assert (found.q_THI.dtype, found.weights_TH.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert found.weights_TH.shape == (91, num_heads)
    assert close(weighted(found), weighted(expected))


def test_scales_are_those_of_the_contract(library: Library, make_step: Callable[..., Any]) -> None:
    """The largest code of a row is 448, so that the scale is amax / 448; head weights of float32 are kept."""
    plan = make_step([300], [5]).plan
    q_THI, weights_TH = normal(5, 8, 128).bfloat16(), normal(5, 8, seed=1)
    found = indexer_sgl_kernel.prepare_query_sgl_kernel(plan, q_THI, weights_TH, ROPE, rounding="fp8_row")
    plain = prepare_query_reference(plan, q_THI.float(), weights_TH, ROPE, rounding="none")
    assert bool((found.q_THI.float().abs().amax(-1) == 448).all())
    scale_TH = plain.q_THI.abs().amax(-1) / 448
    torch.testing.assert_close(found.weights_TH, plain.weights_TH * scale_TH, rtol=1e-5, atol=0.0)


def test_padding_reads_no_position_that_is_not_there(library: Library, make_step: Callable[..., Any]) -> None:
    plan = make_step([300] * 4, [1] * 4, num_decode=4).plan
    plan.batch.positions_T[2:] = -1
    q_THI, weights_TH = normal(4, 8, 128).bfloat16(), normal(4, 8, seed=1)
    q_THI[2:] = torch.nan
    found = indexer_sgl_kernel.prepare_query_sgl_kernel(plan, q_THI, weights_TH, ROPE, rounding="fp8_row")
    expected = prepare_query_reference(plan, q_THI, weights_TH, ROPE, rounding="fp8_row")
    assert close(weighted(found)[:2], weighted(expected)[:2])
    assert plan.batch.positions_T.tolist() == [299, 299, -1, -1]


def test_layers_share_what_a_step_gives(library: Library, make_step: Callable[..., Any]) -> None:
    plan = make_step([300], [3]).plan
    for layer in range(3):
        q_THI, weights_TH = normal(3, 8, 128, seed=layer).bfloat16(), normal(3, 8)
        indexer_sgl_kernel.prepare_query_sgl_kernel(plan, q_THI, weights_TH, ROPE, rounding="fp8_row")
    assert len(library.positions) == 3
    assert len({positions.data_ptr() for positions in library.positions}) == 1


def test_no_tokens_are_no_launch(library: Library, make_step: Callable[..., Any]) -> None:
    plan = make_step([300], [0]).plan
    found = indexer_sgl_kernel.prepare_query_sgl_kernel(
        plan, torch.empty(0, 8, 128).bfloat16(), torch.empty(0, 8), ROPE, rounding="fp8_row"
    )
    assert (found.q_THI.shape, found.weights_TH.shape, library.positions) == ((0, 8, 128), (0, 8), [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rounding": "fp4_group32"}, "fp4_group32 queries"),
        ({"rounding": "none"}, "none queries"),
        ({"q_THI": torch.ones(1, 8, 128)}, "torch.float32"),
        ({"q_THI": torch.ones(1, 8, 64).bfloat16()}, "64 lanes of which 64 rotate"),
        ({"rope": RopeTable(cos_sin_PR=torch.ones(2048, 32))}, "128 lanes of which 32 rotate"),
        ({"weights_TH": torch.ones(1, 4)}, "8 index heads but 4"),
    ],
)
def test_queries_that_the_kernel_lacks_are_refused(
    library: Library, make_step: Callable[..., Any], change: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {"q_THI": torch.ones(1, 8, 128).bfloat16(), "weights_TH": torch.ones(1, 8)}
    given |= {"rope": ROPE, "rounding": "fp8_row"}
    with pytest.raises(ShapeError, match=text):
        indexer_sgl_kernel.prepare_query_sgl_kernel(make_step([9], [1]).plan, **(given | change))
    assert library.positions == []


# ---- what the library is asked by ---------------------------------------------------------------------------------


def test_the_operators_are_there_once_the_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the Python function `rmsnorm` of the package, which hands over to FlashInfer."""
    seen: list[str] = []

    def imported(providers: Any) -> Any:
        seen.extend(provider.module for provider in providers)

    monkeypatch.setattr(sgl_kernel_library, "import_provider", imported)
    assert sgl_kernel_library.sgl_kernel_ops() is torch.ops.sgl_kernel
    assert seen == ["sgl_kernel"]


@pytest.mark.parametrize(("start", "copied"), [(0, False), (8, False), (1, True), (4, True)])
def test_only_what_lies_askew_is_copied(start: int, copied: bool) -> None:
    x = torch.arange(64, dtype=torch.bfloat16)[start : start + 16]
    found = sgl_kernel_library.aligned(x)
    assert torch.equal(found, x)
    assert found.data_ptr() % 16 == 0
    assert (found.data_ptr() != x.data_ptr()) is copied
